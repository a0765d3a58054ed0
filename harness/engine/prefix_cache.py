"""The prefix cache: pages of finished requests, for prompts with the same beginning.

EAGLE's draft sees a token one position early: its entry at position p was computed from token
p + 1. So the key of a page is its own tokens and the next one; a prompt with another
next token computes the page again. Hence at least one token of a prompt is always left
to compute, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.upstream.allocator import PagedAllocator

Key = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A page of a sequence.

    Args:
        key: its tokens and the next one.
        page: its number in the pools of target and draft.
        parent: the page before it, None for the root.
        children: the pages after it, by key.
        users: running requests that read it.
        used: the clock at its last use.
    """

    key: Key
    page: int
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)
    users: int = 0
    used: int = 0


class PrefixCache:
    """A tree of pages; the least recently used leaf is evicted first.

    Args:
        allocator: the allocator of its pages.
    """

    def __init__(self, allocator: PagedAllocator) -> None:
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._root = Node((), 0, None)
        self._clock = 0

    @property
    def pages(self) -> int:
        """Pages in the tree."""
        return sum(1 for _ in self._nodes())

    def acquire(self, tokens: Sequence[int]) -> list[Node]:
        """The longest cached run of whole pages, not evicted until it is released."""
        found, node = [], self._root
        for key in self._keys(tokens, len(tokens)):
            child = node.children.get(key)
            if child is None:
                break
            found.append(node := child)
        for node in found:
            node.users += 1
        self._want(found)
        return found

    def release(self, nodes: Sequence[Node]) -> None:
        """Let what was acquired be evicted again."""
        for node in nodes:
            node.users -= 1

    def insert(self, tokens: Sequence[int], computed: int, pages: Sequence[int]) -> set[int]:
        """Cache pages of a sequence.

        Args:
            tokens: of the sequence.
            computed: how many of them have their keys and values.
            pages: of the sequence, from its start.

        Returns:
            The pages that the tree owns now; the caller keeps the others.
        """
        node, path, taken = self._root, [], set()
        for key, page in zip(self._keys(tokens, computed), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page, node)
                taken.add(page)
            path.append(node := child)
        self._want(path)
        return taken

    def ensure_free(self, pages: int) -> None:
        """Evict until so many pages are free; evict nothing where that does not suffice."""
        wanted = pages - self._allocator.available_pages
        if 0 < wanted <= self._unread():
            self._evict(wanted)

    def clear(self) -> int:
        """Evict every page without users; how many pages that was."""
        unread = self._unread()
        self._evict(unread)
        return unread

    def _unread(self) -> int:
        """Pages without users; users of a page use all before it, so leaves become free in turn."""
        return sum(1 for node in self._nodes() if not node.users)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            leaves = (node for node in self._nodes() if not node.children and not node.users)
            oldest = min(leaves, key=lambda node: node.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.key]
            self._allocator.free([oldest.page])

    def _want(self, path: Sequence[Node]) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock

    def _keys(self, tokens: Sequence[int], computed: int) -> Iterator[Key]:
        """Of every whole page whose keys and values are there and whose next token is known."""
        last = min(computed, len(tokens) - 1) // self._page_size * self._page_size
        for start in range(0, last, self._page_size):
            yield tuple(tokens[start : start + self._page_size + 1])

    def _nodes(self) -> Iterator[Node]:
        waiting = [*self._root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()
