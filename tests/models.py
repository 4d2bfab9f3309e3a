"""Models as their libraries make them, tiny and with random weights, with inputs for them.

The first few are plain PyTorch; the others need what the extra `test` has.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, Any]]

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_TEXT = {"vocab_size": 64, "max_position_embeddings": 64}
_DECODER = {**_SIZES, **_TEXT, **_TOKENS, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Model:
    """`library` is None for plain PyTorch; a training step of one that `is_long` compiles for many seconds."""

    library: str | None
    make: Callable[[], Made]
    is_long: bool = False


def build(name: str) -> Made:
    """The model and its inputs, on the CPU; skips the test where the library is missing."""
    model = {**MODELS, **MORE}[name]
    if model.library is not None:
        try:
            importlib.import_module(model.library)
        except ImportError as error:
            pytest.skip(f"{model.library} cannot be imported ({error}): the extra `models`")
    torch.manual_seed(0)
    return model.make()


def moved(inputs: dict[str, Any], device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The inputs on a device, those of floating point in a dtype."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return {name: move(value) for name, value in inputs.items()}


def tensors(outputs: Any) -> dict[str, Tensor]:
    """What a model returned, on the CPU."""
    return {name: value.detach().cpu() for name, value in outputs.items() if isinstance(value, Tensor)}


def in_full(names: Iterable[str], is_often: Callable[[str], bool]) -> list[Any]:
    """The names as parameters; those that do not run often run with --full."""
    return [name if is_often(name) else pytest.param(name, marks=pytest.mark.full) for name in names]


def _ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))


def _values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class _WithLoss(nn.Module):
    """Gives a model without labels a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        made = self.model(**inputs)
        made = made if isinstance(made, Tensor) else made.sample
        return {"loss": made.square().mean(), "output": made}


class _LlamaBlock(nn.Module):
    """Rotary embedding, grouped queries, a causal mask, a gated MLP."""

    def __init__(self, size: int = 32, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.head = size // heads
        self.norms = nn.ModuleList([nn.RMSNorm(size), nn.RMSNorm(size)])
        self.query, self.out = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.key, self.value = (nn.Linear(size, key_heads * self.head, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[1], device=x.device), 1e4 ** -torch.arange(0, 1, 2 / self.head).to(x))
        turn = torch.polar(torch.ones_like(angle, dtype=torch.float32), angle.float())

        def split(y: Tensor, rotates: bool) -> Tensor:
            y = y.unflatten(-1, (-1, self.head)).transpose(1, 2)
            if rotates:
                pairs = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)))
                y = torch.view_as_real(pairs * turn).flatten(-2).type_as(y)
            return y

        y = self.norms[0](x)
        query, key, value = split(self.query(y), True), split(self.key(y), True), split(self.value(y), False)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, made, 3, 2, 1), nn.Conv2d(made, made, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(made), nn.BatchNorm2d(made)])
        self.shortcut = nn.Conv2d(channels, made, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def _torch_transformer() -> Made:
    model = nn.Transformer(32, 4, 1, 1, 48, dropout=0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return _WithLoss(model), {"src": _values(2, 6, 32), "tgt": _values(2, 4, 32), "tgt_mask": mask}


def _torch_llama() -> Made:
    model = nn.Sequential(nn.Embedding(64, 32), _LlamaBlock(), _LlamaBlock(), nn.Linear(32, 64))
    return _WithLoss(model), {"input": _ids(2, 9)}


def _torch_resnet() -> Made:
    blocks = _ResidualBlock(3, 8), _ResidualBlock(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    return _WithLoss(nn.Sequential(*blocks)), {"input": _values(2, 3, 16, 16)}


def _transformers(name: str, head: str, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Made:
    library = importlib.import_module("transformers")
    return getattr(library, name + head)(getattr(library, name + "Config")(**config)), dict(inputs)


def _language(name: str, config: Mapping[str, Any], head: str = "ForCausalLM") -> Made:
    mask = torch.ones(2, 9, dtype=torch.long)
    return _transformers(name, head, config, {"input_ids": _ids(2, 9), "attention_mask": mask, "labels": _ids(2, 9)})


def _images(name: str, config: Mapping[str, Any]) -> Made:
    inputs = {"pixel_values": _values(2, 3, 16, 16), "labels": torch.tensor([1, 3])}
    return _transformers(name, "ForImageClassification", {**config, "num_labels": 5}, inputs)


def _gpt2() -> Made:
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return _language("GPT2", {**sizes, **_TOKENS, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}, "LMHeadModel")


def _bert() -> Made:
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model, inputs = _language("Bert", {**_SIZES, **_TEXT, **dropout}, "ForMaskedLM")
    inputs["attention_mask"][1, 6:] = 0
    return model, inputs


def _t5() -> Made:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0}
    return _language("T5", {**sizes, **_TOKENS, "decoder_start_token_id": 0}, "ForConditionalGeneration")


def _whisper() -> Made:
    sizes = {"vocab_size": 64, "num_mel_bins": 8, "d_model": 32, "max_source_positions": 10, "max_target_positions": 40}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
    plain = {"dropout": 0, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None}
    inputs = {"input_features": _values(2, 8, 20), "labels": _ids(2, 9)}
    return _transformers("Whisper", "ForConditionalGeneration", {**sizes, **_TOKENS, **plain}, inputs)


def _mamba() -> Made:
    sizes = {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    model, inputs = _language("Mamba", {**sizes, **_TOKENS})
    return model, {name: value[:, :5] for name, value in inputs.items()}


def _clip() -> Made:
    sizes = {**_SIZES, "num_hidden_layers": 1}
    text = {**sizes, **_TEXT, **_TOKENS, "eos_token_id": 61}
    config = {"text_config": text, "vision_config": {**sizes, "image_size": 16, "patch_size": 8}, "projection_dim": 16}
    inputs = {"input_ids": _ids(2, 9), "pixel_values": _values(2, 3, 16, 16), "return_loss": True}
    return _transformers("CLIP", "Model", config, inputs)


def _distilbert() -> Made:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0, "attention_dropout": 0}
    return _language("DistilBert", {**_TEXT, **sizes}, "ForMaskedLM")


def _swin() -> Made:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]}
    return _images("Swin", {**sizes, "window_size": 4, "drop_path_rate": 0})


def _unet() -> Made:
    model = importlib.import_module("diffusers").UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    inputs = {"sample": _values(2, 4, 8, 8), "timestep": torch.tensor([3, 500])}
    return _WithLoss(model), {**inputs, "encoder_hidden_states": _values(2, 5, 16)}


def _autoencoder() -> Made:
    model = importlib.import_module("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=16,
    )
    return _WithLoss(model), {"sample": _values(2, 3, 16, 16)}


def _timm(name: str, image: int = 32, **sizes: Any) -> Made:
    model = importlib.import_module("timm").create_model(name, num_classes=5, **sizes)
    return _WithLoss(model), {"x": _values(2, 3, image, image)}


MODELS: Mapping[str, Model] = {
    "torch.Transformer": Model(None, _torch_transformer),
    "torch.llama": Model(None, _torch_llama),
    "torch.resnet": Model(None, _torch_resnet),
    "gpt2": Model("transformers", _gpt2),
    "llama": Model("transformers", lambda: _language("Llama", _DECODER)),
    "qwen2": Model("transformers", lambda: _language("Qwen2", {**_DECODER, "tie_word_embeddings": True})),
    "qwen3": Model("transformers", lambda: _language("Qwen3", {**_DECODER, "head_dim": 8})),
    "mixtral": Model("transformers", lambda: _language("Mixtral", {**_DECODER, "num_local_experts": 4})),
    "bert": Model("transformers", _bert),
    "t5": Model("transformers", _t5),
    "whisper": Model("transformers", _whisper),
    "mamba": Model("transformers", _mamba, is_long=True),
    "vit": Model("transformers", lambda: _images("ViT", {**_SIZES, "image_size": 16, "patch_size": 8})),
    "clip": Model("transformers", _clip),
    "resnet": Model(
        "transformers",
        lambda: _images(
            "ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        ),
    ),
    "convnext": Model(
        "transformers",
        lambda: _images("ConvNextV2", {"hidden_sizes": [8], "depths": [1], "num_stages": 1}),
        is_long=True,
    ),
    "diffusers.unet": Model("diffusers", _unet, is_long=True),
    "diffusers.autoencoder": Model("diffusers", _autoencoder, is_long=True),
    # Of smaller images the last layers keep a pixel: normalizing two of those makes gradients of rounding alone.
    "timm.resnet": Model("timm", lambda: _timm("resnet10t", 64)),
    "timm.convnext": Model(
        "timm", lambda: _timm("convnext_atto", depths=(1,) * 4, dims=(8, 8, 16, 16), kernel_sizes=3)
    ),
}

_ENCODER = {**_SIZES, **_TEXT, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_PLAIN = {"attention_dropout": 0, "hidden_dropout": 0}
# More architectures, for the tests that compare two ways of running one on the same device.
MORE: Mapping[str, Model] = {
    "roberta": Model("transformers", lambda: _language("Roberta", {**_ENCODER, "pad_token_id": 2}, "ForMaskedLM")),
    "electra": Model("transformers", lambda: _language("Electra", {**_ENCODER, "embedding_size": 32}, "ForMaskedLM")),
    "albert": Model("transformers", lambda: _language("Albert", {**_ENCODER, "embedding_size": 16}, "ForMaskedLM")),
    "opt": Model(
        "transformers", lambda: _language("OPT", {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0})
    ),
    "gpt_neox": Model("transformers", lambda: _language("GPTNeoX", {**_SIZES, **_TEXT, **_TOKENS, **_PLAIN})),
    "gemma": Model("transformers", lambda: _language("Gemma", {**_DECODER, "head_dim": 8})),
    "phi": Model("transformers", lambda: _language("Phi", {**_DECODER, "resid_pdrop": 0, "embd_pdrop": 0})),
    "mistral": Model("transformers", lambda: _language("Mistral", {**_DECODER, "sliding_window": 4})),
    "deit": Model("transformers", lambda: _images("DeiT", {**_SIZES, "image_size": 16, "patch_size": 8})),
    "dinov2": Model("transformers", lambda: _images("Dinov2", {**_SIZES, "image_size": 16, "patch_size": 8})),
    "bloom": Model("transformers", lambda: _language("Bloom", {**_DECODER, "n_layer": 2, "n_head": 4})),
    "distilbert": Model("transformers", _distilbert),
    "swin": Model("transformers", _swin),
    "timm.vit": Model("timm", lambda: _timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=4)),
    "timm.mixer": Model("timm", lambda: _timm("mixer_s32_224", img_size=32, num_blocks=2, embed_dim=32)),
}
ALWAYS = [name for name, model in MODELS.items() if model.library is None]
OFTEN = {*ALWAYS, "gpt2", "llama", "vit"}
