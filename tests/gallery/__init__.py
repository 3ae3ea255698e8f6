"""Architectures of other people, as their libraries build them: each is captured, cut and compared with eager."""
