"""The demo, and the driver of engines and servers that it shares with bench/."""
