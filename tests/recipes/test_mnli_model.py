"""The model of the MNLI recipe at full size: the published shapes, sizes and settings. On the meta device."""

from dataclasses import replace

import pytest
import torch

from comera.nn.size import model_size
from comera.recipes.classify import mnli
from comera.recipes.classify.model import EncoderConfig
from comera.recipes.classify.recipe import untrained


def test_the_full_model_has_the_published_shapes_and_sizes() -> None:
    with torch.device("meta"):
        dense, _ = untrained(mnli.preset("dense", "mnli"), 30_522)
        model, report = untrained(mnli.preset(preset="mnli"), 30_522)
    assert report is not None
    shapes = {row.name: str(row.spec) for row in report.rows if row.spec}
    square = "TT 12·8·8 / 8·8·12 ranks 12-30-30-30-12"
    expected = {
        "bert.embeddings.word_embeddings": "TTM 16·20·10·10 × 4·4·8·6 ranks 30-30-30",
        "bert.pooler.dense": square,
    }
    for k in range(6):
        layer = f"bert.encoder.layer.{k}"
        names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        expected |= {f"{layer}.{name}": square for name in names}
        expected[f"{layer}.intermediate.dense"] = "TT 12·8·8 / 12·16·16 ranks 12-30-30-30-16"
        expected[f"{layer}.output.dense"] = "TT 16·16·12 / 8·8·12 ranks 16-30-30-30-12"
    assert shapes == expected
    left = {row.name for row in report.rows if row.layer and row.spec is None}
    assert left == {"bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings", "classifier"}

    size, original = model_size(model, dense_total=report.dense_total), model_size(dense)
    assert report.dense_total == original.total
    megabytes = [4 * n / 2**20 for n in (original.total, size.dense_tensorized, size.total, size.tensorized)]
    assert megabytes == pytest.approx([255.42, 253.67, 5.61, 3.86], abs=0.005)  # published: 256, 253


def test_the_full_model_has_the_published_settings() -> None:
    config = mnli.preset("comera", "mnli-published")
    with torch.device("meta"):
        bert = untrained(config, 30_522)[0].config
    assert (bert.num_hidden_layers, bert.hidden_size, bert.num_attention_heads, bert.intermediate_size) == (
        6,
        768,
        12,
        3072,
    )
    assert (bert.max_position_embeddings, bert.type_vocab_size, bert.num_labels) == (512, 2, 3)
    assert (bert.hidden_act, bert.hidden_dropout_prob, bert.attention_probs_dropout_prob) == ("gelu", 0.1, 0.1)
    train = config.train
    assert (train.core_lr, train.table_lr, train.lr, train.rank_lr) == (1e-4, None, 5e-5, 1e-3)
    assert train.weight_decay == 0
    assert 32 <= train.batch_size <= 128
    assert (train.late.shrink, config.late_targets, config.data.max_length) == ("surrogate", (0.8, 0.5, 0.2), 128)


def test_other_widths_and_vocabularies_get_balanced_modes() -> None:
    config = replace(mnli.preset(preset="mnli"), model=EncoderConfig(hidden=512, layers=1, heads=8, ffn=2048))
    with torch.device("meta"):
        _, report = untrained(config, 30_522)
        _, other = untrained(replace(mnli.preset(preset="mnli"), model=EncoderConfig(layers=1)), 8_000)
    assert report is not None
    assert other is not None
    for row in [row for row in report.rows if row.spec] + [row for row in other.rows if row.spec]:
        assert row.spec is not None
        assert row.spec.order == (4 if row.after == "TTMEmbedding" else 6)
    assert "8·8·8 / 8·8·8" in str({row.name: row.spec for row in report.rows}["bert.pooler.dense"])
