"""The workflow of goldens: verify, add, rewrite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from harness.core.workflow import Workflow
from harness.differential.golden.files import (
    Content,
    Manifest,
    empty_manifest,
    read_group,
    read_manifest,
    write_groups,
)
from harness.differential.golden.golden_entry import Golden, GoldenOutcome, Identity
from harness.errors import GoldenError

UPDATE = "python3 -m harness golden"


class GoldenStore:
    """Goldens of one folder, by group (one file for tensors, one for facts) and key.

    One process records at a time; any number may verify.

    Args:
        folder: of the goldens.
        workflow: of this run.
        origin: written with every golden of this run.
        update: command that a message offers, without its value.
    """

    def __init__(
        self,
        folder: Path,
        workflow: Workflow = Workflow.VERIFY,
        *,
        origin: dict[str, str] | None = None,
        update: str = UPDATE,
    ) -> None:
        self.folder = folder
        self.workflow = workflow
        self.origin = origin or {}
        self.update = update
        self._manifest: Manifest | None = None
        self._groups: dict[str, Content] = {}
        self._changed: set[str] = set()

    @property
    def manifest(self) -> Manifest:
        """The manifest, read once.

        Raises:
            GoldenError: it is corrupt, or a file is not in it.
        """
        if self._manifest is None:
            try:
                self._manifest = read_manifest(self.folder)
            except GoldenError as error:
                if self.workflow is not Workflow.REWRITE:
                    raise self._damaged(error) from error
                self._manifest = empty_manifest()
        return self._manifest

    def settle(
        self, group: str, key: str, identity: Identity, compute: Callable[[], Golden]
    ) -> tuple[Golden, GoldenOutcome]:
        """The golden of a key, as the workflow has it.

        ``verify`` reads and computes nothing. ``add`` computes what is missing. ``rewrite``
        computes everything and keeps what says the same. Nothing is on disk before ``flush``.

        Raises:
            GoldenError: it is missing (verify), or stale or in a corrupt file (verify, add).
        """
        self._group(group)
        known = key in self.manifest["entries"].get(group, {})
        if known and self.workflow is not Workflow.REWRITE:
            return self._fresh(group, key, identity), GoldenOutcome.VERIFIED
        if self.workflow is Workflow.VERIFY:
            said = f"{self._file(group)} has no golden {key!r}"
            raise GoldenError(f"{said}; record it with: {self.update} {Workflow.ADD}")
        computed = replace(compute(), identity=identity, origin=self.origin)
        if known and self._load(group, key).says_the_same(computed):
            return computed, GoldenOutcome.VERIFIED
        self._put(group, key, computed)
        return computed, GoldenOutcome.REWRITTEN if known else GoldenOutcome.ADDED

    def damage(self) -> str:
        """One line on the first file that is not what the manifest says; a rewrite minds none."""
        try:
            if self.workflow is not Workflow.REWRITE:
                for group in self.manifest["entries"]:
                    self._group(group)
        except GoldenError as error:
            return str(error)
        return ""

    def orphans(self, planned: Iterable[tuple[str, str]]) -> list[str]:
        """One line for every golden that nothing planned asks for; ``rewrite`` drops them."""
        wanted = set(planned)
        entries = self.manifest["entries"]
        recorded = [(group, key) for group in sorted(entries) for key in sorted(entries[group])]
        extra = [pair for pair in recorded if pair not in wanted]
        if self.workflow is Workflow.REWRITE:
            for group, key in extra:
                self._drop(group, key)
        advice = f"drop it with: {self.update} {Workflow.REWRITE}"
        return [f"{self._file(g)} has an orphan golden {k!r}; {advice}" for g, k in extra]

    def flush(self) -> None:
        """Write what this run added, rewrote or dropped; whole files or none.

        Raises:
            GoldenError: the folder cannot be written.
        """
        if self._changed:
            groups = {group: self._groups[group] for group in sorted(self._changed)}
            write_groups(self.folder, self.manifest, groups)
            self._manifest = None
            self._changed.clear()

    def _fresh(self, group: str, key: str, identity: Identity) -> Golden:
        golden = self._load(group, key)
        was, now = asdict(golden.identity), asdict(identity)
        if changed := [name for name in now if was[name] != now[name]]:
            said = f"{self._file(group)} golden {key!r} is stale: {', '.join(changed)} changed"
            raise GoldenError(f"{said}; {self._if_meant}")
        return golden

    def _load(self, group: str, key: str) -> Golden:
        tensors, facts = self._group(group)
        entry = self.manifest["entries"][group][key]
        own = {n.rpartition("/")[2]: t for n, t in tensors.items() if n.rpartition("/")[0] == key}
        identity = Identity(**entry["identity"])
        return Golden(identity=identity, tensors=own, facts=facts[key], origin=entry["origin"])

    def _group(self, group: str) -> Content:
        """Tensors and facts of a group, read once; a rewrite starts anew where they are broken."""
        if group not in self._groups:
            entries = self.manifest["entries"].get(group, {})
            content: Content = ({}, {})
            try:
                if entries:
                    content = read_group(self.folder, group, self.manifest)
            except GoldenError as error:
                if self.workflow is not Workflow.REWRITE:
                    raise self._damaged(error) from error
                entries.clear()
            self._groups[group] = content
        return self._groups[group]

    def _put(self, group: str, key: str, golden: Golden) -> None:
        self._drop(group, key)
        tensors, facts = self._group(group)
        tensors.update({f"{key}/{name}": t.contiguous() for name, t in golden.tensors.items()})
        facts[key] = dict(golden.facts)
        entry = {"identity": asdict(golden.identity), "origin": dict(golden.origin)}
        self.manifest["entries"].setdefault(group, {})[key] = entry

    def _drop(self, group: str, key: str) -> None:
        tensors, facts = self._group(group)
        for name in [n for n in tensors if n.rpartition("/")[0] == key]:
            del tensors[name]
        facts.pop(key, None)
        self.manifest["entries"].get(group, {}).pop(key, None)
        self._changed.add(group)

    def _file(self, group: str) -> Path:
        return self.folder / f"{group}.safetensors"

    def _damaged(self, error: GoldenError) -> GoldenError:
        return GoldenError(
            f"{error}; undo it with: git checkout {self.folder.name}; {self._if_meant}"
        )

    @property
    def _if_meant(self) -> str:
        return f"if the change is meant: {self.update} {Workflow.REWRITE}"
