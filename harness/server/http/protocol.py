"""Bodies of sglang's and OpenAI's requests; what is not carried out is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from harness.server.http import neutral_fields
from harness.server.http.neutral_fields import accepting

MOST_PROMPTS = 64
MOST_MESSAGES = 256
MOST_CHARACTERS = 100_000
MOST_TOKENS = 100_000
MOST_SLEEP_S = 1.0
COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens``."""
ONE_STREAM = "stream: one prompt a request is accepted"
RID = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MOST_TOKENS)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
NewTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class Strict(BaseModel):
    """Wrong types and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


@accepting(neutral_fields.SAMPLING)
class SamplingParams(Strict):
    """Greedy decoding alone; without a temperature too."""

    max_new_tokens: NewTokens = 128
    ignore_eos: bool | None = False


@accepting(neutral_fields.GENERATE, batched=True)
class GenerateRequest(Strict):
    """``POST /generate``: exactly one of text and input_ids; lists are batches."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]}
    )

    text: Text | Texts | None = None
    input_ids: Tokens | TokenLists | None = None
    sampling_params: Annotated[
        SamplingParams, BeforeValidator(lambda given: {} if given is None else given)
    ] = Field(default_factory=SamplingParams.model_construct)
    stream: bool = False
    rid: RID | Annotated[list[RID], Field(min_length=1, max_length=MOST_PROMPTS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("exactly one of text and input_ids is accepted")
        if self.stream and self.batched:
            raise ValueError(ONE_STREAM)
        if isinstance(self.rid, list):
            if not self.batched or len(self.rid) != len(self.prompts):
                raise ValueError("rid: one for each prompt of a batch is accepted")
            if len(set(self.rid)) != len(self.rid):
                raise ValueError("rid: different ids are accepted")
        elif self.rid is not None and self.batched:
            raise ValueError("rid: a list, one for each prompt of a batch, is accepted")
        return self

    @property
    def batched(self) -> bool:
        """Whether lists were sent."""
        if self.text is not None:
            return isinstance(self.text, list)
        return isinstance(self.input_ids, list) and isinstance(self.input_ids[0], list)

    @property
    def prompts(self) -> list[Any]:
        """Texts or lists of tokens."""
        asked: Any = self.text if self.text is not None else self.input_ids
        return list(asked) if self.batched else [asked]


@accepting(neutral_fields.STREAM_OPTIONS)
class StreamOptions(Strict):
    """What else a stream of OpenAI's tells."""

    include_usage: bool | None = False


class OpenAIRequest(Strict):
    """What both of OpenAI's requests have in common; the model served answers to any name."""

    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts of its tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


@accepting(neutral_fields.COMPLETION)
class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``; lists of prompts are batches."""

    prompt: Text | Texts | Tokens | TokenLists
    max_tokens: NewTokens | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.stream and self.to_generate().batched:
            raise ValueError(ONE_STREAM)
        return self

    def to_generate(self) -> GenerateRequest:
        """The same as a request of ``/generate``."""
        first = self.prompt[0]
        texts = isinstance(first, str)
        return GenerateRequest.model_construct(
            text=self.prompt if texts else None,
            input_ids=None if texts else self.prompt,
            sampling_params=SamplingParams.model_construct(
                max_new_tokens=self.max_tokens or COMPLETION_TOKENS, ignore_eos=self.ignore_eos
            ),
        )


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Annotated[str, Field(max_length=MOST_CHARACTERS)]


@accepting(neutral_fields.MESSAGE)
class Message(Strict):
    """One of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MOST_CHARACTERS)] | list[TextPart] | None

    @property
    def texts(self) -> list[str]:
        """Its parts."""
        if isinstance(self.content, list):
            return [part.text for part in self.content]
        return [self.content or ""]


@accepting(neutral_fields.CHAT)
class ChatCompletionRequest(OpenAIRequest):
    """``POST /v1/chat/completions``; without a limit it goes on to the end of the context."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if not any(text for message in self.messages for text in message.texts):
            raise ValueError("messages: some text is accepted")
        return self

    @property
    def prompt(self) -> str:
        """Contents joined by newlines: the shipped tokenizers have no chat template."""
        return "\n".join(text for message in self.messages for text in message.texts)

    def to_generate(self, input_ids: list[int], room: int) -> GenerateRequest:
        """The same as a request of ``/generate``.

        Args:
            input_ids: tokens of the prompt.
            room: tokens that the context has left behind them.
        """
        limit = self.max_completion_tokens or self.max_tokens or max(room, 1)
        return GenerateRequest.model_construct(
            input_ids=input_ids,
            sampling_params=SamplingParams.model_construct(
                max_new_tokens=limit, ignore_eos=self.ignore_eos
            ),
        )


class AbortRequest(Strict):
    """``POST /abort_request``."""

    rid: RID | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> AbortRequest:
        if (self.rid is None) == (not self.abort_all):
            raise ValueError("exactly one of rid and abort_all is accepted")
        return self


class SlowDownRequest(Strict):
    """``POST /slow_down``: sleep before every step, null to stop; for planted regressions."""

    forward_sleep_time: Annotated[float, Field(ge=0.0, le=MOST_SLEEP_S)] | None


class Detail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of every refusal."""

    error: Detail
