"""Other libraries' doors into hf_stream."""
