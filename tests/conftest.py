"""`--thorough` also runs the combinations that differ little from others: `make test-thorough`.

Tests marked `optimised` are about how a compiler rounds and fuses. `make test` compiles them as
users do, and everything else without the compiler's optimisations, which takes half the time.
"""


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run every combination")
    parser.addoption("--part", metavar="i/n", help="of the covering arrays, part i of n")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "thorough: a combination that differs little from others; run with --thorough"
    )
    config.addinivalue_line(
        "markers", "optimised: about how a compiler rounds and fuses; compiled as users compile"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
