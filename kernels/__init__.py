"""Device operations behind one interface: `kernels.interface.operations.Operations`.

This package imports nothing by itself. Its name is also that of a Hugging Face distribution that
transformers looks for; the version below makes transformers treat it as too old and leave it alone.
"""

__version__ = "0"
