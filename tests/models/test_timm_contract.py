"""timm's own tests of its models, from its source package, pointed at ours.

TorchScript apart. The models count among those that timm calls non-standard, as all with a class
token do: `forward_features` gives tokens.
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm

NAMES = os.environ.get(
    "SOFTMAXFREE_TIMM_NAMES",
    "soft_nano softx_nano softpp_tiny_fudan softpp_vit_small",
).split()
"""Set the variable to other names, or to `soft*` for all, to run the tests on those."""

CONFTEST = """
import fnmatch
import softmaxfree, timm

NAMES = [n for n in timm.list_models() if any(fnmatch.fnmatch(n, p) for p in {names!r})]

def list_models(filter="", module="", pretrained=False, exclude_filters="", include_tags=None, **_):
    if pretrained or (include_tags and "vit_*" in exclude_filters):
        return []
    return NAMES

timm.list_models = list_models
"""

CHECKS = {
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs_non_std",
    "test_model_forward_features",
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_model_forward_fx",
    "test_model_backward_fx",
}


@pytest.fixture(scope="session")
def timms_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with timm's tests/test_models.py, of the version that is installed."""
    folder = tmp_path_factory.mktemp("timm")
    fetch = ["download", "--quiet", "--no-deps", "--no-binary", "timm", f"timm=={timm.__version__}"]
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", *fetch, "--dest", str(folder)], capture_output=True, text=True
    )
    if fetched.returncode:
        pytest.skip(f"timm's source package cannot be fetched: {fetched.stderr.strip()[-200:]}")
    (package,) = folder.glob("timm-*.tar.gz")
    with tarfile.open(package) as archive:
        (member,) = [m for m in archive.getmembers() if m.name.endswith("/tests/test_models.py")]
        source = archive.extractfile(member)
        assert source is not None
        (folder / "test_models.py").write_bytes(source.read())
    (folder / "conftest.py").write_text(CONFTEST.format(names=NAMES))
    return folder


@pytest.mark.slow
def test_timms_own_tests_pass(timms_tests: Path) -> None:
    chosen = " or ".join(f"{check}[" for check in CHECKS)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "test_models.py", "-q", "-rA", "-k", chosen,
            "-W", "ignore", "-p", "no:cacheprovider", "--rootdir", ".",
        ],
        cwd=timms_tests, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    passed = re.findall(r"^PASSED test_models\.py::(\w+)\[", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout[-4000:]
    assert set(passed) == set(CHECKS)
    assert len(set(passed)) * len(NAMES) <= len(passed) or any("*" in name for name in NAMES)
