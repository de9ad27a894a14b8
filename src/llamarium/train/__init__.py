"""Training: functions, not a class hierarchy.

Learning from scratch, fine-tuning, LoRA and QLoRA differ in what the rows hold (`Rows`), which labels count, and which
Linears are wrapped; the loop is one.

| what you look for | where |
|---|---|
| one step of learning, one validation | `step`; the loss in `loss`, optimizers and schedules in `optim` |
| a whole run: when it validates, samples, saves, stops | `run`, `signals`; alone in its folder: `conduct`, `lock` |
| what a setting means, its default and its range | `config` |
| what is prepared for `pretrain`, and for `finetune` | `pretrain`, `finetune` |
| what a step is given | `batch` |
| from files, folders and the hub to documents, ids and rows | `sources`, `corpus`, `packing` |
| from JSONL to dialogs, and which tokens are learned | `dialogs`; the dialog formats are `tokenizer.chat`'s |
| in which order, and why a resumed run is the same run | `order`, `position`, `resume` |
| a vocabulary of one's own | `bpe` |
| checkpoints that survive being killed | `checkpoint` |
| LoRA, rsLoRA, DoRA; their files; putting them into the weights | `lora`, `adapters`, `merge` |
| several devices | `team` (what a run asks for), `parallel` (FSDP2, tensor parallelism) |
| what happened | `journal`; as pages `report`, `page`, `snapshots`; elsewhere `trackers`; MFU's peaks in `peak` |
| the same run with one thing changed | `experiments` |
"""
