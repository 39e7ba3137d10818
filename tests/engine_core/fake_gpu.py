"""A GPU whose memory is numbers. Not a test."""

GIB = 1024**3
MIB = 1024**2


class FakeGpu:
    """10 GiB. Torch holds pages that tensors may have left; others have theirs."""

    def __init__(self):
        self.held = 4 * GIB
        self.unused = 512 * MIB
        """Of `held`, in no tensor's use."""
        self.peak = self.held
        self.others = 1 * GIB

    def take(self, size):
        reused = min(size, self.unused)
        self.unused -= reused
        self.held += size - reused
        self.peak = max(self.peak, self.held)

    def drop(self, size):
        self.unused += size

    def release(self):
        self.held -= self.unused
        self.unused = 0
        self.peak = self.held

    def total_bytes(self):
        return 10 * GIB

    def free_bytes(self):
        return self.total_bytes() - self.held - self.others

    def held_bytes(self):
        return self.held

    def peak_held_bytes(self):
        return self.peak
