"""Errors as OpenAI's clients expect them: a status, and {"error": {"message", "type", "param", "code"}}.

400 invalid_request_error     BadRequestError               503 server_error       InternalServerError, tried again
401 authentication_error      AuthenticationError           429 rate_limit_error   RateLimitError, tried again after
404 not_found_error           NotFoundError                                        Retry-After seconds
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """What a client gets. param: the field that it is about. code: a word for programs. retry_s: when to come back,
    rounded up to whole seconds."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})
        if retry_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_s)))

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def as_json(value: Any) -> bytes:
    """Compact JSON. What is no number, NaN and infinity, is a defect of ours and raises ValueError."""
    return _COMPACT.encode(value).encode("utf-8", "replace")
