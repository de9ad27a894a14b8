"""Training: functions, not a class hierarchy.

Learning from scratch, fine-tuning, LoRA and QLoRA differ in what the rows hold (`Rows`), which labels count, and which
Linears are wrapped; the loop is one.
"""
