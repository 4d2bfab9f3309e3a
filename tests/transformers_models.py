"""Small models for the tests that transformers has for all models, which its source distribution has.

tests/library_suites.py puts this file among those tests. What transformers has for a model alone is not distributed.
"""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tests.test_modeling_common import ModelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from transformers.testing_utils import torch_device

BATCH, LENGTH, WORDS, WIDTH, LAYERS, HEADS = 3, 7, 60, 32, 2, 4
IMAGE, PATCH = 16, 4


def words(*shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape, device=torch_device)


def of_text() -> dict[str, torch.Tensor]:
    return {
        "input_ids": words(BATCH, LENGTH),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long, device=torch_device),
    }


def of_two_texts() -> dict[str, torch.Tensor]:
    return {
        **of_text(),
        "decoder_input_ids": words(BATCH, LENGTH),
        "decoder_attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long, device=torch_device),
    }


def of_images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(BATCH, 3, IMAGE, IMAGE, device=torch_device)}


def asked_of(config: Any, inputs: Any, seq_length: int = LENGTH, **more: Any) -> Any:
    """What the tests of all models ask a model for."""
    return SimpleNamespace(
        batch_size=BATCH, seq_length=seq_length, num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=WIDTH,
        is_training=True, get_config=config, prepare_config_and_inputs_for_common=lambda: (config(), inputs()), **more,
    )  # fmt: skip


class LlamaTest(ModelTesterMixin, TrainingTesterMixin, unittest.TestCase):
    _torch_compile_train_cls = transformers.LlamaForCausalLM
    all_model_classes = (
        transformers.LlamaModel, transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification,
        transformers.LlamaForQuestionAnswering, transformers.LlamaForTokenClassification,
    )  # fmt: skip
    all_generative_model_classes = ()

    @property
    def model_tester(self) -> Any:
        return asked_of(
            lambda: transformers.LlamaConfig(
                vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=LAYERS, pad_token_id=0,
                num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1,
                eos_token_id=2,
            ),
            of_text, causal_lm_class=transformers.LlamaForCausalLM, base_model_class=transformers.LlamaModel,
        )  # fmt: skip


class GPT2Test(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        transformers.GPT2Model, transformers.GPT2LMHeadModel, transformers.GPT2ForSequenceClassification,
        transformers.GPT2ForQuestionAnswering, transformers.GPT2ForTokenClassification,
    )  # fmt: skip
    all_generative_model_classes = ()

    @property
    def model_tester(self) -> Any:
        return asked_of(
            lambda: transformers.GPT2Config(
                vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=37, n_positions=64,
                bos_token_id=1, eos_token_id=2, pad_token_id=0,
            ),
            of_text,
        )  # fmt: skip


class BertTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        transformers.BertModel, transformers.BertForMaskedLM, transformers.BertForSequenceClassification,
        transformers.BertForQuestionAnswering, transformers.BertForTokenClassification,
    )  # fmt: skip

    @property
    def model_tester(self) -> Any:
        return asked_of(
            lambda: transformers.BertConfig(
                vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                intermediate_size=37, max_position_embeddings=64, type_vocab_size=4, pad_token_id=0,
            ),
            of_text,
        )  # fmt: skip


class ViTTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        transformers.ViTModel, transformers.ViTForImageClassification, transformers.ViTForMaskedImageModeling,
    )  # fmt: skip
    test_resize_embeddings = False

    @property
    def model_tester(self) -> Any:
        return asked_of(
            lambda: transformers.ViTConfig(
                image_size=IMAGE, patch_size=PATCH, num_channels=3, hidden_size=WIDTH, num_hidden_layers=LAYERS,
                num_attention_heads=HEADS, intermediate_size=37, encoder_stride=PATCH,
            ),
            of_images, (IMAGE // PATCH) ** 2 + 1, image_size=IMAGE, patch_size=PATCH, num_masks=5,
            mask_length=(IMAGE // PATCH) ** 2,
        )  # fmt: skip

    @unittest.skip("a ViT has no words")
    def test_inputs_embeds(self) -> None: ...

    @unittest.skip("a ViT's embeddings are of patches")
    def test_model_get_set_embeddings(self) -> None: ...


class T5Test(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (transformers.T5Model, transformers.T5ForConditionalGeneration)
    all_generative_model_classes = ()
    is_encoder_decoder = True

    @property
    def model_tester(self) -> Any:
        return asked_of(
            lambda: transformers.T5Config(
                vocab_size=WORDS, d_model=WIDTH, d_ff=37, d_kv=WIDTH // HEADS, num_layers=LAYERS, num_heads=HEADS,
                num_decoder_layers=LAYERS, dropout_rate=0.1, eos_token_id=1, bos_token_id=0, pad_token_id=0,
                decoder_start_token_id=0,
            ),
            of_two_texts, encoder_seq_length=LENGTH, decoder_seq_length=LENGTH,
        )  # fmt: skip
