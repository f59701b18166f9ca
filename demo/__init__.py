"""The demo, and the classes that run engines and servers as child processes, which bench/ uses
too."""
