"""Resolves the parts of a request that the model decides: the task, the checkpoint's options, and the tokens."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import PromptError, TokenizerFailed
from snapcap.models.text import GenerationConfig, Task
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.errors import InvalidOption, UnsupportedOption
from snapcap.warmup.runtime.slot_request import SamplingParams

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig
    from snapcap.models.processing.tokenizer import Tokenizer
    from snapcap.service.engine.request import Limits

_logger = logging.getLogger("snapcap.captioning")
# Options that a checkpoint may set and a request overrides. Both use the same names.
_DEFAULTED = SamplingParams.__dataclass_fields__.keys() & GenerationConfig.__dataclass_fields__.keys()


@dataclass(frozen=True)
class Resolved:
    """Holds a request as the engine takes it. The caption begins with `prompt_ids`; the encoder reads `text_ids`
    beside the image."""

    prompt_ids: tuple[int, ...]
    text_ids: tuple[int, ...]
    params: SamplingParams


class ModelDefaults:
    """Resolves requests for one model. Safe to use from several threads."""

    def __init__(self, tokenizer: "Tokenizer", config: "ModelConfig | None" = None, task: str = "") -> None:
        """Reads the defaults of a model. Without `config` the model sets no defaults. `task` is the server's
        default task; "" means the model's.

        Raises:
            ConfigError: a task's text or the default instruction cannot be tokenized, has a token that the model
                lacks, or is too long for the encoder.
            InvalidOption, UnsupportedOption: the model has no such task.
        """
        self._tokenizer = tokenizer
        self._rows = None if config is None else config.decoder.vocab_size
        self.family = None if config is None else config.family  # transformers' `model_type`
        self._texts = {} if config is None else _task_texts(tokenizer, config)
        self._unasked = self._instruction()
        self._bos = () if config is None else _begin(config.generation)
        self._defaults = SamplingParams() if config is None else _params(config.generation)
        self._plain = self._defaults == SamplingParams()
        # If a model has a chat template, transformers counts the template and the image's placeholders in
        # min_length.
        self._before = 0 if config is None or config.chat is None else config.prefix_length
        self.not_done = () if config is None else config.generation.not_done
        self._task = self._known(task) if task else next(iter(self._texts), "")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks for requests, the default first; empty if the model has only one task."""
        return tuple(sorted(self._texts, key=lambda name: name != self._task))

    def resolve(
        self,
        options: CaptionOptions,
        limits: "Limits",
        *,
        live: bool = False,
        read: Sequence[int] | None = None,
    ) -> Resolved:
        """Resolves the options of a request. `live`: each token is wanted when it is generated. `read`: the
        prompt's ids, if another process has tokenized the prompt; None tokenizes the prompt here.

        Raises:
            InvalidOption, UnsupportedOption, PromptTooLong
        """
        task = self._known(options.task) if options.task else self._task
        text_ids = self._texts[task] if task else ()
        prompt_ids = self._prompt_ids(options.prompt, read)
        params = options.sampling if self._plain else self._params(options, limits, live)
        if params.min_length:
            least = max(params.min_length - self._before - 1 - len(prompt_ids), 0)
            given = params.min_new_tokens
            params = replace(params, min_length=0, min_new_tokens=least if given is None else given)
        limits.check(len(prompt_ids), None if options.clamp else params.max_new_tokens, params.num_beams)
        return Resolved(prompt_ids, text_ids, params)

    def _instruction(self) -> tuple[int, ...]:
        """Returns the token ids of a request without a prompt: the default instruction's, if the model takes
        instructions.

        Raises:
            ConfigError: the tokenizer fails at the default instruction, or the model lacks one of its tokens.
        """
        try:
            ids = self._tokenizer.prompt_ids("")
            wrong = _beyond(self._tokenizer, ids, self._rows)
        except TokenizerFailed as error:
            wrong = error.cause
        if wrong:
            from snapcap.models.fields import ConfigError  # noqa: PLC0415  with a checkpoint only

            raise ConfigError("tokenizer", "", f"the default instruction cannot be read: {wrong}")
        return ids

    def _prompt_ids(self, prompt: str, read: Sequence[int] | None) -> tuple[int, ...]:
        """Returns the ids of a prompt: the caption's beginning, or an instruction. Raises InvalidOption."""
        if not prompt:
            return self._unasked
        try:
            ids = self._tokenizer.prompt_ids(prompt) if read is None else read
        except PromptError as error:
            if isinstance(error, TokenizerFailed):
                _logger.warning("the tokenizer failed at a prompt", extra={"fields": {"error": error.cause}})
            raise InvalidOption("prompt", str(error)) from None
        beyond = _beyond(self._tokenizer, ids, self._rows)
        if beyond:
            raise InvalidOption("prompt", f"hold only tokens that the model has: {beyond}")
        return (*self._bos, *ids)

    def _params(self, options: CaptionOptions, limits: "Limits", live: bool) -> SamplingParams:
        defaults = {name: getattr(self._defaults, name) for name in _DEFAULTED if name not in options.named}
        params = replace(options.sampling, biased=self._defaults.biased, **defaults)
        if "num_beams" in options.named:
            return params
        # Beams are the checkpoint's default here, so fewer beams, or none, are no error.
        beams = 1 if live or params.samples else min(params.num_beams, limits.max_beams)
        return replace(params, num_beams=beams, fewer_beams=beams > 1)

    def _known(self, task: str) -> str:
        """Returns the task's name as `tasks` has it. Raises InvalidOption or UnsupportedOption if there is no such
        task."""
        if not self._texts:
            raise UnsupportedOption("task", "this model has one task alone, so leave it out")
        name = Task.named(task)
        if name not in self._texts:
            raise InvalidOption(
                "task", f"be one of {', '.join(self._texts)}; what else a model can do is not served"
            )
        return name


def _task_texts(tokenizer: "Tokenizer", config: "ModelConfig") -> dict[str, tuple[int, ...]]:
    """Returns the token ids of each task's text, with the model's begin and end tokens, by the task's name."""
    from snapcap.models.fields import ConfigError  # noqa: PLC0415  with a checkpoint only

    generation, most = config.generation, config.decoder.text_tokens
    texts = {}
    for task in config.tasks:
        try:
            text = tokenizer.encode(task.text)
        except TokenizerFailed as error:
            raise ConfigError("tokenizer", task.name, f"its text cannot be read: {error.cause}") from None
        ids = (*_begin(generation), *text, *generation.eos_ids[:1])
        if len(ids) > most:
            raise ConfigError("tokenizer", task.name, f"its text has {len(ids)} tokens, the encoder takes {most}")
        beyond = _beyond(tokenizer, ids, config.decoder.vocab_size)
        if beyond:
            raise ConfigError("tokenizer", task.name, f"its text cannot be read: {beyond}")
        texts[task.name] = ids
    return texts


def _beyond(tokenizer: "Tokenizer", ids: Sequence[int], rows: int | None) -> str:
    """Describes a token that the tokenizer knows and the model has no row for; returns "" if there is none.

    A tokenizer may have added tokens that the model does not have. For such a token the device would read past its
    tables, and all requests of the batch would fail.
    """
    if rows is None or max(ids, default=0) < rows:
        return ""
    number = max(ids)
    return f"the tokenizer's {tokenizer.token(number)[:64]!r} is token {number}, and the model has {rows} tokens"


def _begin(generation: GenerationConfig) -> tuple[int, ...]:
    return () if generation.forced_bos_id is None else (generation.forced_bos_id,)


def _params(generation: GenerationConfig) -> SamplingParams:
    defaults = {name: getattr(generation, name) for name in _DEFAULTED}
    return SamplingParams(biased=generation.biased, **defaults)
