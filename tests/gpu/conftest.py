import pytest

REPORT = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how long the checks took, and which did not run."""
    if lines := terminalreporter.config.stash.get(REPORT, []):
        terminalreporter.section("checks")
        for line in lines:
            terminalreporter.write_line(line)
