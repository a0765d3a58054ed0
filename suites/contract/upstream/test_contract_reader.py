"""A contract is read from source alone: members, signatures, entry points, wherever a class is."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.upstream import contract
from harness.upstream.contract import Contract, WatchedClass, read_contract

CALLER = "kernels.py"
BASE = """
import not_installed

class Backend(ABC):
    \"\"\"A docstring is no member.\"\"\"
    needs_lens: bool = True
    translator = None
    left, right = 1, 2
    name: Optional[str]

    def forward(self, q: Tensor, /, *rest: int, scale: float = 1.0, flag=(1, 'a'), **more: M):
        self.planned = q

    async def watch(self): ...
    def _hook(self, batch): ...
    def __repr__(self): ...

    @property
    def mask(self) -> Mask: ...
    @functools.cached_property
    def sizes(self): ...
    @property
    def state(self): ...
    @state.setter
    def state(self, value): ...
    @staticmethod
    def empty(bs=0): ...
    @classmethod
    @torch.no_grad()
    def idle(cls, *, device="cuda"): ...

class Mode(enum.IntEnum):
    EXTEND = auto()
    DECODE = 2
    def is_decode(self): ...

@dataclass
class Batch(First, base.Second[int]):
    lens: list[int] = field(default_factory=list)
    def __init__(self, lens=None): ...
    def _private(self): ...
"""
CALLS = """
from elsewhere import flashinfer_like
from flashinfer_like import other
from .flashinfer import own
import flashinfer
import flashinfer.page
import flashinfer.rope as rope
import flashinfer_like.rope as other_rope
if available():
    from flashinfer import Wrapper, unused as renamed

class Kernel:
    def __init__(self, words):
        from flashinfer.cascade import merge
        self.wrapper = Wrapper(words, "NHD", backend="fa2")
        self.other = Wrapper(*words, backend="fa3")
        self.forward = flashinfer.decode.paged(query=words, **self.more)(1)
        merge(rope.apply(words))
        self.flashinfer.decode.paged(ours=1)
        flashinfer.page.append(words)
        flashinfer_like(other(own(other_rope.apply(words))))
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    watched = tuple(WatchedClass(name, ("base.py", "new/base.py")) for name in ("Backend", "Mode"))
    monkeypatch.setattr(contract, "WATCHED", (*watched, WatchedClass("Batch", ("base.py",), "9.1")))
    monkeypatch.setattr(contract, "CALLERS", (CALLER,))
    write(tmp_path, "base.py", BASE)
    write(tmp_path, CALLER, "")
    return tmp_path


def write(root: Path, file: str, text: str) -> None:
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(textwrap.dedent(text), encoding="utf-8")


def entry_points(obtained: Contract) -> Contract:
    return {name: one for name, one in obtained.items() if name.startswith("flashinfer")}


def test_members_of_an_abstract_class_have_their_kind_signature_and_default(source: Path) -> None:
    obtained = read_contract(source)["Backend"]
    assert "_hook" in obtained, "a hook with a private name, which subclasses override, is a member"
    told = "a signature leaves out annotations, of keyword-only parameters too"
    assert "scale=1.0" in obtained["forward"], told
    assert obtained["forward"].endswith(", **more)"), told
    assert obtained == {
        "(class)": "class Backend(ABC) in base.py",
        "needs_lens": "attribute: bool = True",
        "translator": "attribute = None",
        "name": "attribute: Optional[str]",
        "forward": "method (self, q, /, *rest, scale=1.0, flag=(1, 'a'), **more)",
        "watch": "method (self)",
        "_hook": "method (self, batch)",
        "mask": "property",
        "sizes": "property",
        "state": "settable property",
        "empty": "staticmethod (bs=0)",
        "idle": "classmethod (cls, *, device='cuda')",
    }


def test_an_enum_has_members_and_a_concrete_class_its_constructor(source: Path) -> None:
    obtained = read_contract(source)
    assert obtained["Mode"] == {
        "(class)": "class Mode(enum.IntEnum) in base.py",
        "EXTEND": "enum member = auto()",
        "DECODE": "enum member = 2",
        "is_decode": "method (self)",
    }
    assert obtained["Batch"] == {
        "(class)": "class Batch(First, base.Second[int]) in base.py",
        "lens": "attribute: list[int] = field(default_factory=list)",
        "__init__": "method (self, lens=None)",
    }


def test_a_class_is_read_where_it_moved_to(source: Path) -> None:
    before = read_contract(source)
    write(source, "new/base.py", "class Mode: ...\n" + BASE.partition("class Mode")[0])
    write(source, "base.py", "class Mode(enum.Enum): ONE = 1")
    after = read_contract(source)
    assert after["Backend"].pop("(class)") == "class Backend(ABC) in new/base.py"
    assert after["Backend"].items() < before["Backend"].items()
    # Both files have it: the first counts.
    assert after["Mode"]["ONE"] == "enum member = 1"
    assert "Batch" not in after


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("base.py", "class Mode: ...", "defines Backend in base.py or new/base.py"),
        ("base.py", "class Backend: ...", "defines Mode in base.py or new/base.py"),
        ("base.py", "class Backend(:", r"whose base.py is Python \(invalid syntax"),
        (CALLER, None, r"holds kernels.py \(No such file or directory\)"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    source: Path, file: str, text: str | None, told: str
) -> None:
    if text is None:
        (source / file).unlink()
    else:
        write(source, file, text)
    with pytest.raises(UsageError, match=f"^source = '{source}' is not accepted; .* {told}"):
        read_contract(source)


def test_entry_points_have_the_arguments_that_any_call_passes(source: Path) -> None:
    write(source, CALLER, CALLS)
    obtained = entry_points(read_contract(source))
    assert {name: sorted(one) for name, one in obtained.items()} == {
        "flashinfer.Wrapper": ["(named)", "*", "0", "1", "backend="],
        "flashinfer.unused": ["(named)"],
        "flashinfer.cascade.merge": ["(named)", "0"],
        "flashinfer.decode.paged": ["(named)", "**", "query="],
        "flashinfer.page.append": ["(named)", "0"],
        "flashinfer.rope": ["(named)"],
        "flashinfer.rope.apply": ["(named)", "0"],
    }
    assert all(file == CALLER for one in obtained.values() for file in one.values())


def test_files_that_pass_an_argument_are_told(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [f"{letter}.py" for letter in "fbdaec"]
    monkeypatch.setattr(contract, "CALLERS", files)
    for file in files[:-1]:
        write(source, file, "import flashinfer\nflashinfer.plan(bs=1)")
    write(source, files[-1], "from flashinfer import plan\nplan(seq_lens=2)")
    assert entry_points(read_contract(source)) == {
        "flashinfer.plan": {
            "(named)": "a.py, b.py, c.py, d.py, e.py, f.py",
            "bs=": "a.py, b.py, d.py, e.py, f.py",
            "seq_lens=": "c.py",
        }
    }
