"""Who waits: requests that can still be in time go first, the shortest first; those that are late already, last.

A request whose first token is late counts for nothing, whatever is done for it. Serving it before one that can still
be in time costs a request.
"""

TTFT_S = 0.25  # the track's objective
ROW_S = 0.0002  # about what a row of a prompt takes, on the course's clock


def order(requests, now_s):
    return [key(one) for one in requests]


def key(request):
    """Smaller goes first. A second is a unit; a request that is late stands behind all others."""
    if request["running"]:
        return -1.0
    to_compute = request["tokens"] - request["computed"]
    late = request["waited_s"] + to_compute * ROW_S > TTFT_S
    return to_compute * ROW_S + (1000.0 if late else 0.0)
