"""Typed errors: what was wrong, where, and what would be right.

Every error that reaches a person or a client is a `LonglaneError`. `code` and `status` follow the OpenAI error body
(`invalid_request_error` and friends); a command-line tool prints `message` on one line and exits with 2.
"""


class LonglaneError(Exception):
    """Base of all errors raised on foreign input."""

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, code: str | None = None, status: int | None = None, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.param = param


def counted(number: int, noun: str) -> str:
    """A number of things, as a sentence has it: "1 lane", "2 lanes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """One line, whatever a file put into its names."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class FileError(LonglaneError):
    """Of a foreign file. Its message is one printable line, which may quote what the file says."""

    def __init__(self, message: str, *, code: str | None = None, status: int | None = None, param: str | None = None):
        super().__init__(printable(message), code=code, status=status, param=param)


class ArtifactError(FileError):
    """An artifact file that cannot be read: names the file, the object and the cure."""

    code = "invalid_artifact"


class CheckpointError(FileError):
    """A Hugging Face directory or GGUF file that cannot be loaded or converted."""

    code = "invalid_checkpoint"


class ConfigError(LonglaneError):
    """A flag or an environment variable with a value that cannot be used."""

    code = "invalid_configuration"


class PlanError(LonglaneError):
    """A memory plan that cannot be: names the bound that breaks and the nearest setting that fits."""

    code = "plan_does_not_fit"


class RequestError(LonglaneError):
    """A request that is answered with a client error."""

    code = "invalid_request"
    status = 400


class EngineError(LonglaneError):
    """The engine cannot serve: it is starting, restarting, overloaded or dead."""

    code = "service_unavailable"
    status = 503
