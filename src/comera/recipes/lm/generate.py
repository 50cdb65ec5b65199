"""Continues a text with a trained model: of a run, of a checkpoint or of an export; compressed models as they are.

Text streams as it comes: bytes of tokens go through an incremental UTF-8 decoder, so that a character whose bytes are
spread over several tokens appears once it is whole."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from comera.baselines import has_own_layers
from comera.baselines.tokens import ShortConv
from comera.errors import CheckpointError, ConfigError, check_fields
from comera.pretrained import MANIFEST, WEIGHTS, load_pretrained, read_manifest
from comera.recipes.data.tokenizer import FILE
from comera.recipes.lm.recipe import NAME
from comera.recipes.lm.tokenizer import read_tokenizer, size_of, token_bytes
from comera.recipes.trained import open_trained


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises ConfigError for a value out of range."""

    max_new_tokens: int = 128
    """Tokens to write, at most."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability; 1 for all."""
    seed: int = 0
    """Of the draws: the same seed writes the same text."""

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "a number >= 0; 0 takes the likeliest token"),
            "top_p": (0 < self.top_p <= 1, "a probability, > 0 and <= 1"),
            "seed": (0 <= self.seed < 2**63, "an integer >= 0"),
        }
        check_fields(self, "", checks)


@dataclass(frozen=True)
class Writer:
    """A trained model and its tokenizer. where: what they were read from. Raises ConfigError if the two have different
    vocabularies."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    where: Path

    def __post_init__(self) -> None:
        rows, tokens = self.model.config.vocab_size, size_of(self.tokenizer)
        if rows != tokens:
            raise ConfigError(
                f"{self.where}: expected the tokenizer that the model was trained with, of {rows:,} tokens, got one of "
                f"{tokens:,}: put the run's own {FILE} there"
            )

    @property
    def context(self) -> int:
        """The longest text that the model reads, in tokens; the first one starts the document."""
        return int(self.model.config.max_position_embeddings)

    def write(self, prompt: str, sampling: Sampling, show: Callable[[str], object]) -> str:
        """Continue a text with transformers' `generate` and its cache of keys and values.

        Args:
            prompt: the beginning of a document.
            sampling: how tokens are chosen.
            show: called with each new piece of text.

        Returns:
            Why it ended: "" after all tokens or at the end of the document, else a sentence about the context.

        Raises:
            ConfigError: the prompt is empty, or longer than the context.
        """
        if not prompt:
            raise ConfigError("expected a prompt, the beginning of a text, got an empty one")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"expected a prompt of valid UTF-8, got {prompt!r}") from None
        separator = self.model.config.eos_token_id
        ids = torch.tensor([[separator, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]])
        room = self.context - ids.shape[1]
        if room < 1:
            raise ConfigError(
                f"expected a prompt that leaves room in the context of {self.context:,} tokens, got one that is "
                f"{1 - room:,} too long ({ids.shape[1]:,} with the one that starts a document): shorten it"
            )
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        stream = _Stream(token_bytes(self.tokenizer), separator, show)
        with torch.random.fork_rng(devices=[]):  # models are on the CPU here
            torch.manual_seed(sampling.seed)
            generate: Any = self.model.generate
            generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(room, sampling.max_new_tokens),
                do_sample=sampling.temperature > 0,
                **(drawn if sampling.temperature > 0 else {}),
                use_cache=not any(isinstance(module, ShortConv) for module in self.model.modules()),
                pad_token_id=separator,
                streamer=stream,
            )
        if stream.ended or stream.count < room or sampling.max_new_tokens <= room:
            return ""
        return f"the context of {self.context:,} tokens is full: stopped after {stream.count:,} new ones"


class _Stream(BaseStreamer):  # type: ignore[misc, unused-ignore]
    """Gives text to `show` as soon as its characters are whole. count: tokens so far. ended: with the document."""

    def __init__(self, table: list[bytes], separator: int, show: Callable[[str], object]) -> None:
        self._table, self._separator, self._show = table, separator, show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt = True
        self.count, self.ended = 0, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # comes first
            self._prompt = False
            return
        for id in value.flatten().tolist():
            self.count += 1
            self.ended = id == self._separator
            if not self.ended:
                self._emit(self._decoder.decode(self._table[id]))

    def end(self) -> None:
        self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> None:
        if text:
            self._show(text)


def open_writer(path: Path, read_config: Callable[[str, Path], Any]) -> Writer:
    """The model of a run of lm, of one of its checkpoints, or of a folder that `comera export` wrote from one.
    read_config: see `open_trained`. Raises ConfigError for a run of another recipe, CheckpointError for other folders
    and for damaged files."""
    path = path.expanduser()
    weights = any((path / name).exists() for name in (WEIGHTS, MANIFEST))
    if weights and not (path / "trainer.json").exists() and (path / "config.json").exists():
        return Writer(_exported(path), read_tokenizer(path, "EXPORT"), path)
    trained = open_trained(path, read_config)
    if trained.recipe != NAME:
        raise ConfigError(f"expected a run of {NAME}, which writes text, got one of {trained.recipe}: {path}")
    assert isinstance(trained.model, PreTrainedModel)
    return Writer(trained.model, read_tokenizer(trained.checkpoint.parents[1], "RUN"), trained.checkpoint.parents[1])


def _exported(folder: Path) -> PreTrainedModel:
    """The model of an export, dense or compressed."""
    dense = not (folder / MANIFEST).exists()
    try:
        with torch.device("cpu" if dense else "meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        if dense:
            missing, others = load_model(model, folder / WEIGHTS, strict=False)  # older exports have ties twice
            unknown = {*others} - model.state_dict().keys()
            if missing or unknown:
                raise ValueError(f"missing {sorted(missing)}, unexpected {sorted(unknown)}")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"expected an export of {NAME} in {folder}, got one that does not load ({reason}): export the run again"
        ) from error
    if not dense:
        about = read_manifest(folder)["metadata"]
        if about.get("recipe") != NAME or has_own_layers(about["method"]):
            raise ConfigError(
                f"expected an export of {NAME} whose layers comera or transformers know, got one of "
                f"{about.get('recipe')}, {about.get('method')} in {folder}: give a run of {NAME} itself"
            )
        load_pretrained(model, folder)
    model.eval()
    return model
