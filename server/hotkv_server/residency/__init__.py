"""Residencies: each pins the blocks of a running request in host memory, where its engine reads
them directly. So a request's context may exceed the engine's device memory. See README.md."""
