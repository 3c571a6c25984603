"""Layer 9: other libraries' doors into this one, a folder for each; every one is optional."""
