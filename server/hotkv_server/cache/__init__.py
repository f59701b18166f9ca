"""Pure decisions: no clock, no I/O, no threads, no torch, no protobuf. Time is passed in as
`now_s`."""
