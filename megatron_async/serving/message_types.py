"""Types of fields of messages, with their ranges: what is out of range is not read, so that neither
a table nor a sum is ever given a number that it cannot hold."""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Of a request or a question."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Of one request, or what are as many; their sums can be sent, too."""
Difference = Annotated[int, msgspec.Meta(ge=-(2**48), le=2**48)]
"""Of sizes of a replica, or a size."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Below 0, or of decades, where a clock was set; never NaN."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
"""A name or label that is shown."""
Trace = Annotated[
    str, msgspec.Meta(pattern=r"\A(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")
]  # fmt: skip
"""What `trace_context.read_traceparent` gives."""
