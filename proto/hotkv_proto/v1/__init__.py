"""Generated code of the wire protocol `hotkv.v1`; `make proto` writes it."""
