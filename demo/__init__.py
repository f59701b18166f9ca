"""The demo, and child processes of engines and servers, which bench/ uses too."""
