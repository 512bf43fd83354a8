"""Compiled programs are kept between runs of the suite, and let go between files.

On disk, outside of the clone, JAX keeps each program under a digest of its code and of the
compiler's options: a test whose program has changed compiles anew. Another interpreter, JAX or
processor has a directory of its own, since a program compiled for one may not run on the other.
`JAX_ENABLE_COMPILATION_CACHE=false` goes without; `JAX_COMPILATION_CACHE_DIR` names another place.

In memory, the programs of a file are let go after it: a process that keeps those of all files runs
out of memory maps and crashes.
"""

import gc
import hashlib
import os
import pathlib
import platform
from importlib.metadata import version

import pytest

# Several times what the suite fills.
MOST_BYTES = 2**30


def _processor() -> str:
    """Its model and its instructions, where the system says."""
    described = pathlib.Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return " ".join([platform.machine(), platform.processor(), *sorted(features)])


def _place() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    versions = [platform.python_version(), version("jax"), version("jaxlib")]
    digest = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return pathlib.Path(home) / "diffmh-tests" / "-".join([*versions, digest])


# Before JAX starts, and for the processes that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_place()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402


def pytest_sessionfinish(session):
    """Of this suite's own directory, what was used longest ago goes. (JAX's bound on the size reads
    the whole directory for every program that it writes.)
    """
    if hasattr(session.config, "workerinput") or not _place().is_dir():
        return
    files = [(path, path.stat()) for path in _place().iterdir()]
    too_many = sum(stat.st_size for _, stat in files) - MOST_BYTES
    for path, stat in sorted(files, key=lambda file: max(file[1].st_atime, file[1].st_mtime)):
        if too_many <= 0:
            break
        path.unlink(missing_ok=True)
        too_many -= stat.st_size


def pytest_collection_finish():
    """Tracing makes many objects: Python's collector, which goes over all that were imported each
    time, took a sixth of it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def _leave_as_found():
    """A file that switches the precision for good (importing PyTensor's JAX backend does) fails
    itself, instead of whatever comes after it.
    """
    x64 = jax.config.jax_enable_x64
    yield
    assert jax.config.jax_enable_x64 == x64, "these tests left JAX in another precision"
    jax.clear_caches()
    gc.collect()
