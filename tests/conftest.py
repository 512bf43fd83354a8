"""`--thorough` also runs the combinations that differ little from others: `make test-thorough`."""


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run every combination")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "thorough: a combination that differs little from others; run with --thorough"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
