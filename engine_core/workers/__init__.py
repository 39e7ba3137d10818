"""Several processes that run one model: rank 0, which is the daemon, and its workers, which follow
its plans. Must not know how a model is loaded: `engine_core/startup/worker.py` does."""
