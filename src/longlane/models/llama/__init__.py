"""The Llama family: plain rotary attention and SwiGLU."""
