"""Where attention runs. One file a platform; this table is the registry.

Adding a backend: write `backends/<name>.py` with `unavailable_reason()` and `create()`, following
`backends.base.Backend`, and add its line here. The module is imported only when somebody asks for
that backend, and must import vendor packages inside `create()`.
"""

BACKENDS: dict[str, str] = {
    "cpu": "backends.cpu",
}
