"""The check that a mapping holds exactly the tensors a model is built from."""

from collections.abc import Mapping

from longlane.errors import CheckpointError
from longlane.kernels.linear import Weight

_SHOWN = 6

Shapes = Mapping[str, tuple[int, ...]]


def check_weights(weights: Mapping[str, Weight], required: Shapes, optional: Shapes, ignored: tuple[str, ...]) -> None:
    """Compare names and shapes. Names below a prefix of `ignored` belong to other components.

    Raises:
        CheckpointError: listing what is missing, what nothing uses, and what has another shape than the config says.
    """
    known = {**required, **optional}
    present = {name: tuple(weight.shape) for name, weight in weights.items() if not name.startswith(ignored)}
    missing = [name for name in required if name not in present]
    extra = [name for name in present if name not in known]
    wrong = [
        f"{name} is {list(shape)}, not {list(known[name])}"
        for name, shape in present.items()
        if name in known and shape != known[name]
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
        for what, names in (
            ("missing", missing),
            ("that no layer uses", extra),
            ("of another shape than the configuration says", wrong),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"tensors do not fit the model ({'; '.join(problems)}); take config and weights from the same checkpoint"
        )
