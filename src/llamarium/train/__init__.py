"""Training: functions, not a class hierarchy.

Learning from scratch, fine-tuning, LoRA, QLoRA and DPO differ in what the rows hold (`data.batch.Rows`), which labels
count, and which Linears are wrapped; a `step` and the loop around it (`run`) are the same. Settings are in `config`.
"""
