"""MiniMax-M3's text model in transformers' common model tests; collected by ``run.py`` alone."""

from __future__ import annotations

import importlib
import os
import unittest
from typing import Any

import torch
from transformers import MiniMaxM3VLForCausalLM
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from m3ops.integrations import transformers as integration

IMPLEMENTATION = os.environ["M3OPS_COMMON_SUITE"]
# Ours selects int32 ids.
ID_DTYPE = torch.int32 if IMPLEMENTATION == integration.NAME else torch.int64

# transformers' tests, which `run.py` has put on the path.
common: Any = importlib.import_module("tests.test_modeling_common")
generation: Any = importlib.import_module("tests.generation.test_utils")


class ModelTester:
    """Sizes and inputs, by the names that the common tests ask for."""

    def __init__(self) -> None:
        self.batch_size, self.seq_length = 3, 40
        self.num_hidden_layers, self.hidden_size, self.num_attention_heads = 2, 32, 4
        self.vocab_size, self.is_training = 99, True

    def get_config(self) -> MiniMaxM3VLTextConfig:
        config = MiniMaxM3VLTextConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            head_dim=16,
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=8,
            index_topk_blocks=2,
            layer_types=["full_attention", "minimax_m3_sparse"],
            mlp_layer_types=["dense", "sparse"],
            intermediate_size=32,
            dense_intermediate_size=64,
            shared_intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            pad_token_id=2,
            bos_token_id=0,
            eos_token_id=1,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        )
        config._attn_implementation = IMPLEMENTATION
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 3) + 3
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class MiniMaxM3TextModelTest(
    common.ModelTesterMixin,
    generation.GenerationTesterMixin,
    unittest.TestCase,
):
    all_model_classes = (modeling.MiniMaxM3VLTextModel, MiniMaxM3VLForCausalLM)
    test_all_params_have_gradient = False

    def setUp(self) -> None:
        self.model_tester = ModelTester()

    def test_the_implementation_is_at_work(self) -> None:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        seen = []
        model = MiniMaxM3VLForCausalLM(config)
        model.model.layers[1].self_attn.indexer.register_forward_hook(
            lambda module, args, ids: seen.append(ids.dtype)
        )
        model(**inputs)
        self.assertEqual(seen, [ID_DTYPE])
