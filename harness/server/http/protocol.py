"""Request bodies of sglang's and OpenAI's endpoints; what is not implemented is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from harness.server.http import neutral_fields
from harness.server.http.neutral_fields import NeutralFields

MOST_PROMPTS = 64
MOST_MESSAGES = 256
MOST_CHARACTERS = 100_000
MOST_TOKENS = 100_000
MOST_SLEEP_S = 1.0
COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens``."""
ONE_STREAM = "stream: one prompt per request is accepted"
RID = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MOST_TOKENS)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
NewTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


@dataclass(frozen=True, kw_only=True)
class GenerateReqInput:
    """Prompts to continue, from any of the endpoints.

    Args:
        prompts: texts or lists of tokens.
        batched: whether the response is a list.
        rids: an id per prompt; None for one that the server makes.
        max_new_tokens: most tokens per prompt; None for the rest of the context.
        ignore_eos: whether to continue after the end token.
        prompt_field: the client's name of the prompts.
        limit_field: the client's name of the limit.
    """

    prompts: Sequence[str] | Sequence[list[int]]
    batched: bool
    rids: Sequence[str | None]
    max_new_tokens: int | None
    ignore_eos: bool
    prompt_field: str
    limit_field: str


class Strict(BaseModel):
    """A body in which wrong types and unknown fields are errors.

    Attributes:
        neutral: further fields, at the values that change nothing.
        batched_neutral: whether lists of such values, one per prompt, are accepted too.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[NeutralFields] = {}
    batched_neutral: ClassVar[bool] = False

    # As fields of the model they would cost time in every request, the absent ones too.
    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return neutral_fields.without_neutral(
            given, cls.neutral, batched=cls.batched_neutral, title=cls.__name__
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema with the neutral fields."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        properties |= neutral_fields.json_schemas(cls.neutral, batched=cls.batched_neutral)
        return schema


class SamplingParams(Strict):
    """Parameters of greedy decoding, which is what the server does without a temperature too."""

    neutral = neutral_fields.SAMPLING
    max_new_tokens: NewTokens = 128
    ignore_eos: bool | None = False


class GenerateRequest(Strict):
    """``POST /generate``: exactly one of text and input_ids; lists are batches."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]}
    )
    neutral = neutral_fields.GENERATE
    batched_neutral = True

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
        given: Any = self.text if self.text is not None else self.input_ids
        return list(given) if self.batched else [given]

    def to_input(self) -> GenerateReqInput:
        """The endpoint-independent form."""
        rids = self.rid if isinstance(self.rid, list) else [self.rid] * len(self.prompts)
        return GenerateReqInput(
            prompts=self.prompts,
            batched=self.batched,
            rids=rids,
            max_new_tokens=self.sampling_params.max_new_tokens,
            ignore_eos=bool(self.sampling_params.ignore_eos),
            prompt_field="input_ids" if self.text is None else "text",
            limit_field="sampling_params.max_new_tokens",
        )


class StreamOptions(Strict):
    """Options of OpenAI's streams."""

    neutral = neutral_fields.STREAM_OPTIONS
    include_usage: bool | None = False


class OpenAIRequest(Strict):
    """Fields of both of OpenAI's requests; the model that is served answers to any name."""

    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts of its tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``; lists of prompts are batches."""

    neutral = neutral_fields.COMPLETION
    prompt: Text | Texts | Tokens | TokenLists
    max_tokens: NewTokens | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.stream and self.batched:
            raise ValueError(ONE_STREAM)
        return self

    @property
    def batched(self) -> bool:
        """Whether several prompts may be sent: a list of texts or of lists of tokens."""
        return isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)

    def to_input(self) -> GenerateReqInput:
        """The endpoint-independent form."""
        prompts: Any = self.prompt if self.batched else [self.prompt]
        return GenerateReqInput(
            prompts=prompts,
            batched=self.batched,
            rids=[None] * len(prompts),
            max_new_tokens=self.max_tokens or COMPLETION_TOKENS,
            ignore_eos=bool(self.ignore_eos),
            prompt_field="prompt",
            limit_field="max_tokens",
        )


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Annotated[str, Field(max_length=MOST_CHARACTERS)]


class Message(Strict):
    """One message of a conversation."""

    neutral = neutral_fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MOST_CHARACTERS)] | list[TextPart] | None

    @property
    def texts(self) -> list[str]:
        """Its parts."""
        if isinstance(self.content, list):
            return [part.text for part in self.content]
        return [self.content or ""]


class ChatCompletionRequest(OpenAIRequest):
    """``POST /v1/chat/completions``; without a limit it continues to the end of the context."""

    neutral = neutral_fields.CHAT
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

    def to_input(self) -> GenerateReqInput:
        """The endpoint-independent form."""
        return GenerateReqInput(
            prompts=[self.prompt],
            batched=False,
            rids=[None],
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
            ignore_eos=bool(self.ignore_eos),
            prompt_field="messages",
            limit_field="max_completion_tokens" if self.max_completion_tokens else "max_tokens",
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
    """``POST /slow_down``: sleep before every step, null to stop; for injected slowdowns."""

    forward_sleep_time: Annotated[float, Field(ge=0.0, le=MOST_SLEEP_S)] | None


class Detail(BaseModel):
    """The error of a refusal."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of every refusal."""

    error: Detail
