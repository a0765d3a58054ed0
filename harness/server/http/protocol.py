"""Bodies of sglang's HTTP interface, as far as they are served; what is not is refused by name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_PROMPTS = 64
MOST_CHARACTERS = 100_000
MOST_TOKENS = 100_000
MOST_SLEEP_S = 1.0
RID = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MOST_TOKENS)]


class Strict(BaseModel):
    """Wrong types and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingParams(Strict):
    """Greedy sampling alone."""

    max_new_tokens: int = Field(128, ge=1, le=MOST_TOKENS)
    temperature: float = Field(0.0, ge=0.0, le=0.0)
    ignore_eos: bool = False


class GenerateRequest(Strict):
    """``POST /generate``: exactly one of text and input_ids; lists are batches."""

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)] | None = None
    input_ids: (
        Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)] | None
    ) = None
    sampling_params: SamplingParams = Field(default_factory=SamplingParams.model_construct)
    stream: bool = False
    rid: RID | Annotated[list[RID], Field(min_length=1, max_length=MOST_PROMPTS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("exactly one of text and input_ids is accepted")
        if self.stream and self.batched:
            raise ValueError("stream: one prompt a request is accepted")
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
    code: int


class ErrorBody(BaseModel):
    """The body of every refusal."""

    error: Detail
