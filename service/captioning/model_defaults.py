"""Resolves the parts of a request that the model decides: the task, the checkpoint's options, and the tokens.
Reads the answer from the tokens that come back."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import PromptError, TokenizerFailed
from snapcap.models.text import INPUT, GenerationConfig, PromptIds, Region, Task
from snapcap.service.captioning.caption_text import CaptionText, Style, StyledText
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
    """Holds a request as the engine takes it. The caption begins with `prompt_ids`, the first `ahead` of which
    stand before the image; the encoder reads `text_ids` beside the image. `task` is None for a model without tasks.
    `style`: how the caption is shortened. `warning`: a sentence for the user, or ""."""

    prompt_ids: tuple[int, ...]
    text_ids: tuple[int, ...]
    params: SamplingParams
    task: Task | None = None
    style: Style = Style()
    ahead: int = 0
    warning: str = ""


class Answer(NamedTuple):
    """Holds the text that a model wrote. `regions`: the parts of the image that the text names, in pixels of the
    upright image; None for a task whose answer names none."""

    text: str
    regions: list[Region] | None = None


def regions_member(regions: Sequence[Region] | None) -> dict[str, Any]:
    """Returns the member `regions` of a reply; {} if there is none."""
    return {} if regions is None else {"regions": [region.to_dict() for region in regions]}


class ModelDefaults:
    """Resolves requests for one model. Safe to use from several threads."""

    def __init__(self, tokenizer: "Tokenizer", config: "ModelConfig", task: str = "") -> None:
        """Reads the defaults of a model. `task` is the server's default task; "" means the model's.

        Raises:
            ConfigError: a task's text or the default instruction cannot be tokenized, has a token that the model
                lacks, or is too long for the encoder.
            InvalidOption, UnsupportedOption: the model has no such task.
        """
        self._tokenizer = tokenizer
        self._rows = config.decoder.vocab_size
        self.family = config.family  # transformers' `model_type`
        self._unasked = self._instruction()
        self._eos = config.generation.eos_ids[:1]
        self._bos = _begin(config.generation)
        self._defaults = _params(config.generation)
        self._plain = self._defaults == SamplingParams()
        # If a model has a chat template, transformers counts the template and the image's placeholders in
        # min_length.
        self._before = 0 if config.chat is None else config.prefix_length
        self.not_done = config.generation.not_done
        self._most_text = config.decoder.text_tokens
        self._all = config.tasks
        self._omitted = _omitted(config.generation)
        self._texts: dict[str, tuple[int, ...]] = {}
        self._not_read: dict[str, str] = {}  # why the encoder cannot read a task's text
        self._tasks = {each.name: each for each in self._all if each.takes_text or self._reads(each)}
        self._task = self._known(task) if task else next(iter(self._tasks.values()), None)
        if self._task is not None and self._task.name not in self._tasks:
            self._reads(self._task)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks for requests, the default first; empty if the model has only one task."""
        default = () if self._task is None else (self._task.name,)
        return (*default, *(name for name in self._tasks if name not in default))

    def text(self, options: CaptionOptions) -> str:
        """Returns the text that is tokenized for the task of a request; "" if its ids are known.

        Raises:
            InvalidOption, UnsupportedOption: there is no such task, or it lacks a text, or takes none.
        """
        task, given = self._task_of(options), options.task_text.strip()
        if task is None or not task.takes_text:
            if not given:
                return ""
            if task is None:
                raise UnsupportedOption("task_text", "this model has one task alone, so leave it out")
            raise InvalidOption("task_text", f"be absent, because the task {task.name} takes no text")
        if not given and task.name in self._tasks:
            raise InvalidOption("task_text", f"be given, because the task {task.name} takes a text")
        return "" if not given and task.name in self._texts else task.text.replace(INPUT, given)

    def tokenizer(self, task: Task | None) -> "Tokenizer":
        """Returns the tokenizer that makes the text of a task's answers."""
        return self._marked if task is not None and task.keeps_marks else self._tokenizer

    @cached_property
    def _marked(self) -> "Tokenizer":
        return self._tokenizer.with_marks(self._omitted)

    def answer(self, resolved: Resolved, tokens: Sequence[int], size: tuple[int, int]) -> Answer:
        """Returns the answer that a request's tokens are. `size`: (width, height) of the upright image."""
        task, tokenizer = resolved.task, self.tokenizer(resolved.task)
        text = resolved.style.applied(tokenizer.caption(resolved.prompt_ids, tokens))
        if task is None or task.regions is None:
            return Answer(text)
        return Answer(text, task.regions(tokenizer.answer(resolved.prompt_ids, tokens), size))

    def pieces(self, resolved: Resolved, stop: Sequence[str] = ()) -> CaptionText:
        """Returns the text after a request's prompt, which takes what the tokenizer writes of each token, up to the
        first of the `stop` sequences."""
        continued = bool(resolved.prompt_ids) and not self._tokenizer.takes_instructions
        if not resolved.style:
            return CaptionText(stop, keep_leading_space=continued)
        before = self.tokenizer(resolved.task).caption(resolved.prompt_ids, ()) if continued else ""
        return StyledText(resolved.style, before, stop, keep_leading_space=continued)

    def resolve(
        self,
        options: CaptionOptions,
        limits: "Limits",
        *,
        live: bool = False,
        read: PromptIds | None = None,
        text_read: Sequence[int] | None = None,
    ) -> Resolved:
        """Resolves the options of a request. `live`: each token is wanted when it is generated. `read`,
        `text_read`: ids of the prompt and of `text`, if another process has tokenized them; None tokenizes here.

        Raises:
            InvalidOption, UnsupportedOption, PromptTooLong
        """
        task = self._task_of(options)
        text_ids = self._text_ids(task, options, text_read)
        prompt_ids, ahead, moved = self._prompt_ids(options, limits, read)
        params = options.sampling if self._plain else self._params(options, limits, live)
        if params.min_length:
            least = max(params.min_length - self._before - 1 - len(prompt_ids), 0)
            given = params.min_new_tokens
            params = replace(params, min_length=0, min_new_tokens=least if given is None else given)
        wanted = None if options.clamp else params.max_new_tokens
        limits.check(len(prompt_ids), wanted, params.num_beams, ahead)
        style, warning = Style(options.max_chars, options.trim_lead), self._warning(moved)
        return Resolved(prompt_ids, text_ids, params, task, style, ahead, warning)

    def _warning(self, moved: int) -> str:
        """Returns the sentence for a request whose text was moved behind the image; "" if none was. `moved`: see
        `PromptIds`."""
        if not moved:
            return ""
        why = "this model reads no text before the image"
        if self._tokenizer.takes_conversations:
            why = f"a server with --text-tokens {moved + 1} reads the text in its place"
        return f"The text before the image was read behind the image: {why}."

    def _instruction(self) -> PromptIds:
        """Returns the token ids of a request without a prompt: the default instruction's, if the model takes
        instructions.

        Raises:
            ConfigError: the tokenizer fails at the default instruction, or the model lacks one of its tokens.
        """
        try:
            unasked = self._tokenizer.prompt_ids("")
            wrong = _beyond(self._tokenizer, unasked.ids, self._rows)
        except TokenizerFailed as error:
            wrong = error.cause
        if wrong:
            from snapcap.models.fields import ConfigError  # noqa: PLC0415  with a checkpoint only

            raise ConfigError("tokenizer", "", f"the default instruction cannot be read: {wrong}")
        return unasked

    def _prompt_ids(self, options: CaptionOptions, limits: "Limits", read: PromptIds | None) -> PromptIds:
        """Returns the ids of a prompt, which is the caption's beginning, or an instruction. Raises
        InvalidOption."""
        if not (options.prompt or options.around):
            return self._unasked
        try:
            found = read or self._tokenizer.prompt_ids(options.prompt, options.around, limits.most_ahead)
        except PromptError as error:
            if isinstance(error, TokenizerFailed):
                _logger.warning("the tokenizer failed at a prompt", extra={"fields": {"error": error.cause}})
            raise InvalidOption("prompt", str(error)) from None
        beyond = _beyond(self._tokenizer, found.ids, self._rows)
        if beyond:
            raise InvalidOption("prompt", f"hold only tokens that the model has: {beyond}")
        return found._replace(ids=(*self._bos, *found.ids))

    def _params(self, options: CaptionOptions, limits: "Limits", live: bool) -> SamplingParams:
        defaults = {name: getattr(self._defaults, name) for name in _DEFAULTED if name not in options.named}
        params = replace(options.sampling, biased=self._defaults.biased, **defaults)
        if "num_beams" in options.named:
            return params
        # Beams are the checkpoint's default here, so fewer beams, or none, are no error.
        beams = 1 if live or params.samples else min(params.num_beams, limits.max_beams)
        return replace(params, num_beams=beams, fewer_beams=beams > 1)

    def _task_of(self, options: CaptionOptions) -> Task | None:
        return self._known(options.task) if options.task else self._task

    def _known(self, name: str) -> Task:
        """Returns the task of this name. Raises InvalidOption or UnsupportedOption if there is no such task, or if
        the encoder cannot read its text."""
        if not self._tasks:
            raise UnsupportedOption("task", "this model has one task alone, so leave it out")
        task = Task.find(name, self._all)
        if task is None:
            raise InvalidOption("task", f"be one of {', '.join(self._tasks)}, or the checkpoint's own in <>")
        if task.name in self._not_read:
            raise InvalidOption("task", f"be another: {self._not_read[task.name]}")
        return task

    def _reads(self, task: Task) -> bool:
        """Tokenizes the text of a task that a request needs no text for. Returns whether the encoder can read it.

        Raises:
            ConfigError: the encoder cannot read the text, and the model or the server needs the task.
        """
        try:
            ids = self._framed(self._tokenizer.encode(task.text.replace(INPUT, "")))
            wrong = self._unreadable(ids)
        except TokenizerFailed as error:
            ids, wrong = (), error.cause
        if not wrong:
            self._texts[task.name] = ids
        elif task.keeps_marks and not task.takes_text:
            self._not_read[task.name] = wrong
        else:
            from snapcap.models.fields import ConfigError  # noqa: PLC0415  with a checkpoint only

            raise ConfigError("tokenizer", task.name, wrong)
        return not wrong

    def _text_ids(self, task: Task | None, options: CaptionOptions, read: Sequence[int] | None) -> tuple[int, ...]:
        """Returns the ids that the encoder reads beside the image. Raises InvalidOption, UnsupportedOption."""
        text = self.text(options)
        if task is None or not text:
            return () if task is None else self._texts[task.name]
        name = "task_text" if options.task_text else "task"
        try:
            ids = self._framed(self._tokenizer.encode(text) if read is None else read)
        except TokenizerFailed as error:
            _logger.warning("the tokenizer failed at a text", extra={"fields": {"error": error.cause}})
            raise InvalidOption(name, str(error)) from None
        if wrong := self._unreadable(ids):
            raise InvalidOption(name, f"be a text that the model can read: {wrong}")
        return ids

    def _framed(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the ids of a text between the model's begin and end tokens."""
        return (*self._bos, *ids, *self._eos)

    def _unreadable(self, ids: Sequence[int]) -> str:
        """Returns why the encoder cannot read these ids; "" if it can."""
        if len(ids) > self._most_text:
            more = f"`--text-tokens {len(ids)}` makes room"
            return f"its text has {len(ids)} tokens, the encoder takes {self._most_text}; {more}"
        beyond = _beyond(self._tokenizer, ids, self._rows)
        return beyond and f"its text cannot be read: {beyond}"


def _beyond(tokenizer: "Tokenizer", ids: Sequence[int], rows: int) -> str:
    """Describes a token that the tokenizer knows and the model has no row for; returns "" if there is none.

    A tokenizer may have added tokens that the model does not have. For such a token the device would read past its
    tables, and all requests of the batch would fail.
    """
    if max(ids, default=0) < rows:
        return ""
    number = max(ids)
    return f"the tokenizer's {tokenizer.token(number)[:64]!r} is token {number}, and the model has {rows} tokens"


def _begin(generation: GenerationConfig) -> tuple[int, ...]:
    return () if generation.forced_bos_id is None else (generation.forced_bos_id,)


def _omitted(generation: GenerationConfig) -> frozenset[int]:
    """Returns the special tokens that are no part of an answer."""
    return frozenset((generation.start_id, generation.pad_id, *generation.eos_ids, *_begin(generation)))


def _params(generation: GenerationConfig) -> SamplingParams:
    defaults = {name: getattr(generation, name) for name in _DEFAULTED}
    return SamplingParams(biased=generation.biased, **defaults)
