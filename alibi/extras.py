"""The packages that only parts of the library need, under the extra that installs them."""

import importlib.metadata
import importlib.util

# Names of imports, which may differ from those of the distributions in pyproject.toml.
EXTRAS = {
    "train": (
        "absl",
        "etils",
        "fsspec",
        "grain",
        "ml_collections",
        "optax",
        "orbax",
        "psutil",
        "scipy",
        "tensorboardX",
        "tqdm",
        "yaml",
    ),
    "data": (
        "datasets",
        "huggingface_hub",
        "pyarrow",
        "safetensors",
        "tensorflow_datasets",
        "tokenizers",
        "zstandard",
    ),
    "report": ("vl_convert",),
    "gcs": ("gcsfs",),
    "s3": ("s3fs",),
    "torch": ("torch",),
    "harness": ("lm_eval",),
}
_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}


class MissingPackageError(ModuleNotFoundError):
    """An extra's package is not installed. The message is the command that installs it."""


def needs(user: str, *packages: str) -> None:
    """Raises MissingPackageError if one of `packages`, names of imports, is not installed.

    Args:
      user: names the part of the library, the flag or the config key that needs the packages.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"{user} needs the package {package}, which is not installed: "
                + _command(_EXTRA_OF[package]),
                name=package,
            )


def _command(extra: str) -> str:
    """Returns the command that installs an extra."""
    try:
        importlib.metadata.version("alibi-jax")
    except importlib.metadata.PackageNotFoundError:  # a clone with scripts/setup.sh
        in_all = extra in ("train", "data", "report")
        more = ", then source .venv/bin/activate" if in_all else f" --extra={extra}"
        return f"bash scripts/setup.sh{more}"
    return f'pip install "alibi-jax[{extra}]"'
