"""What both front doors share: tokenizer, chat template, defaults, validation, limits.

Knows nothing of HTTP or gRPC. `frontend.Frontend` is what the doors use.
"""
