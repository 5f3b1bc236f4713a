"""Errors of sdjax, one class per boundary.

Every message says what was found and ends with what to do. A failure is attributed to exactly one boundary, so that a
reader of FAILED.json knows where to look without a stack trace.
"""

# Exit codes of the command line, by which launchers decide what comes next; 1 and 2 would only repeat.
FAILED_EXIT_CODE, CONFIG_EXIT_CODE = 1, 2
LOCKED_EXIT_CODE = 73  # EX_CANTCREAT: another process works in the run directory
INTERRUPTED_EXIT_CODE = 75  # EX_TEMPFAIL: stopped by SIGTERM or SIGUSR1; the same command goes on
CTRL_C_EXIT_CODE = 130  # stopped by SIGINT; the same command goes on


class SdjaxError(Exception):
    """Base class. ``boundary`` names the part of the system that failed."""

    boundary = "sdjax"

    def __init__(self, found: str, fix: str = ""):
        self.found = found
        self.fix = fix
        super().__init__(f"[{self.boundary}] {found}" + (f" To fix: {fix}" if fix else ""))

    def __reduce__(self):
        # Exceptions cross process boundaries (environment workers), so both arguments must survive pickling.
        return (type(self), (self.found, self.fix))


class ConfigError(SdjaxError):
    boundary = "config"


class DataError(SdjaxError):
    boundary = "data"


class EnvError(SdjaxError):
    boundary = "environment"


class EngineError(SdjaxError):
    boundary = "engine"


class CompletionLost(EngineError):
    """One completion failed and the engine goes on: the episode can be played again."""


class ModelError(SdjaxError):
    boundary = "model"


class TeacherContextError(SdjaxError):
    boundary = "teacher"


class CheckpointError(SdjaxError):
    boundary = "checkpoint"


class RunDirError(SdjaxError):
    boundary = "run directory"
