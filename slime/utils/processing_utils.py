"""Tokenizers, processors and media, loaded without running code from the model's folder."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.exceptions import ConfigError
from slime.models.hf_folder import check_regular_files
from slime.typing import Processor

if TYPE_CHECKING:
    from PIL import Image


def load_tokenizer(name_or_path: str, **kwargs: object) -> Any:
    """The tokenizer of a local Hugging Face folder or cached model. ConfigError says what is
    missing.
    """
    from transformers import AutoTokenizer

    _check_folder(name_or_path, "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(name_or_path, **{"trust_remote_code": False, **kwargs})
    except Exception as error:  # noqa: BLE001 - a damaged file makes it raise anything
        raise ConfigError(
            f"cannot load a tokenizer from {name_or_path!r}: {type(error).__name__}: {error}"
        ) from error


def load_processor(name_or_path: str, **kwargs: object) -> Any | None:
    """The multimodal processor of a folder, None where the model takes text only."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    if Path(name_or_path).is_dir() and not any(
        (Path(name_or_path) / name).exists()
        for name in ("preprocessor_config.json", "processor_config.json")
    ):
        return None
    _check_folder(name_or_path, "processor")
    try:
        processor = AutoProcessor.from_pretrained(
            name_or_path, **{"trust_remote_code": False, **kwargs}
        )
    except (OSError, ValueError):
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _check_folder(name_or_path: str, what: str) -> None:
    looks_like_path = name_or_path.startswith((".", "/", "~"))
    if looks_like_path and not Path(name_or_path).expanduser().is_dir():
        raise ConfigError(f"cannot load a {what}: folder {name_or_path!r} does not exist.")
    check_regular_files(Path(name_or_path).expanduser())


@functools.lru_cache(maxsize=4)
def _tokenizer(name_or_path: str) -> Any:
    return load_tokenizer(name_or_path)


def shared_tokenizer(name_or_path: str) -> Any:
    """`load_tokenizer`, once per process and folder."""
    return _tokenizer(str(name_or_path))


def process_vision_info(
    prompt: list[dict], processor: Processor | None = None
) -> dict[str, list | None]:
    """The media of a message list: {"images": [PIL image] or None, "videos": [...] or None}, in
    order of appearance.

    `qwen_vl_utils` decides sizes where it is installed; without it images are opened as they are,
    and videos are refused with ConfigError.
    """
    try:
        from qwen_vl_utils import process_vision_info as qwen_process
    except ImportError:
        return _collect_media(prompt)
    patch = getattr(getattr(processor, "image_processor", None), "patch_size", None)
    images, videos = qwen_process(prompt, **({"image_patch_size": patch} if patch else {}))
    return {"images": images, "videos": videos}


def _collect_media(prompt: list[dict]) -> dict[str, list | None]:
    images = []
    for message in prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part.get("type") == "video" or "video" in part:
                raise ConfigError(
                    "video prompts need the package qwen-vl-utils: pip install qwen-vl-utils"
                )
            if part.get("type") in ("image", "image_url") or "image" in part:
                images.append(_open_image(part.get("image", part.get("image_url"))))
    return {"images": images or None, "videos": None}


def _open_image(source: Any) -> Any:
    from PIL import Image

    if isinstance(source, dict):
        source = source.get("bytes") or source.get("url") or source.get("path")
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, str) and source.startswith("data:"):
        source = base64.b64decode(source.split(",", 1)[1])
    if isinstance(source, str):
        if source.startswith(("http://", "https://")):
            raise ConfigError(
                f"image {source[:80]!r} is a web address; download it and give a path."
            )
        source = source.removeprefix("file://")
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        return image.convert("RGB")


def build_processor_kwargs(multimodal_inputs: dict | None = None) -> dict[str, Any]:
    """Arguments of a processor's call for the given media: only the kinds that are present, as
    tensors.
    """
    given = {kind: media for kind, media in (multimodal_inputs or {}).items() if media is not None}
    return {**given, "return_tensors": "pt"}


def encode_image_for_rollout_engine(image: Image.Image) -> str:
    """The image as a PNG data URL, which is what engines accept."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
