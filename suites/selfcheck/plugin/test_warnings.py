"""Which warnings end a test: all of this project, and what other packages deprecate does not."""

import warnings

import pytest

DEPRECATED = (DeprecationWarning, FutureWarning)


@pytest.mark.parametrize("category", DEPRECATED)
@pytest.mark.parametrize("module", ["flashinfer.gemm.kernels", "sglang", "ciphers.ci"])
def test_other_packages_may_deprecate(category: type[Warning], module: str) -> None:
    warnings.warn_explicit("use another name", category, f"{module}.py", 1, module)


@pytest.mark.parametrize("category", DEPRECATED)
@pytest.mark.parametrize(
    "module", ["ci.gate", "fixtures.plan", "harness.kernels", "suites.conftest"]
)
def test_this_project_may_not(category: type[Warning], module: str) -> None:
    with pytest.raises(category, match="use another name"):
        warnings.warn_explicit("use another name", category, f"{module}.py", 1, module)


def test_other_warnings_end_a_test_wherever_they_are_from() -> None:
    with pytest.raises(RuntimeWarning, match="divide by zero"):
        warnings.warn_explicit("divide by zero", RuntimeWarning, "numpy.py", 1, "numpy")
