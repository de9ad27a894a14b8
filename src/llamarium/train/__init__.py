"""Training: functions, not a class hierarchy.

Pretraining, fine-tuning, LoRA, QLoRA and DPO differ in what the rows contain (`data.batch.Rows`), which labels are
learned and which Linears are wrapped. The training step (`step`) and the loop (`run`) are shared. Settings are in
`config`.
"""
