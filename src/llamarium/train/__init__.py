"""Training: functions, not a class hierarchy.

Learning from scratch, fine-tuning, LoRA and QLoRA differ in what the rows hold (`Rows`), which labels count, and which
Linears are wrapped; the loop is one.

| what you look for | where |
|---|---|
| one step of learning, one validation | `step`; the loss in `objectives`; `optim` |
| preferences: of two answers, the better one | `dpo`, `data.pairs` |
| a whole run: when it validates, samples, saves, stops | `run`; what it works with: `setup`; in its folder: `conduct` |
| how many threads compute | `threads` |
| `llamarium.pretrain`, `finetune` and `dpo` | `functions` |
| what a setting means, its default and its range | `config` |
| what is prepared for `pretrain`, and for `finetune` | `pretrain`, `finetune` |
| what a step is given, and in which order | `data.batch`, `data.order` |
| from files, folders and the hub to documents, ids and rows | `data.sources`, `data.corpus`, `data.packing` |
| from JSONL to dialogs, and which tokens are learned | `data.dialogs`, `data.dialog_rows` |
| a vocabulary of one's own | `data.bpe` |
| checkpoints that survive being killed, the lock, signals | `state.checkpoint`, `state.lock`, `state.signals` |
| why a resumed run is the same run | `state.resume` |
| LoRA, rsLoRA, DoRA; their files; merging | `llamarium.adapters`; from names to a folder: `merge` |
| several devices | `conduct` and `distributed.process_group`; FSDP2 and tensor parallelism in `distributed.parallel` |
| what happened: the journal, pages, trackers | `report.journal`, `report.write`, `report.page`, `report.trackers` |
| the same run with one thing changed | `experiments` |
"""
