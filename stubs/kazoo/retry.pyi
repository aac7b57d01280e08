class KazooRetry:
    def __init__(
        self, max_tries: int = 1, delay: float = 0.1, backoff: float = 2, max_delay: float = 60.0
    ) -> None: ...
