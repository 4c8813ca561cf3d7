"""The Python interface: one function per command, live objects where a YAML file has names."""
