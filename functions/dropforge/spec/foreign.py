"""Names of settings in the scripts of TRL, Axolotl, LLaMA-Factory, Unsloth and OpenAI, for people who bring one.

`TAKEN` has the fields of a job spec that do the same. `REFUSED` has why a setting is not taken, and what to do instead.
"""

from __future__ import annotations

# The field of the spec, and its names elsewhere.
_NAMES = {
    "name": "run_name model_suffix suffix",
    "model.source": "model_name_or_path base_model base_model_config model_name model_id pretrained_model_name_or_path",
    "model.revision": "model_revision revision_of_model",
    "model.attn_implementation": "attn_impl flash_attention flash_attn use_flash_attention_2 sdp_attention",
    "model.chat_template": "chat_template_jinja chat_template_path custom_chat_template template",
    "dataset.source": "dataset_name dataset_dir datasets data_path data_files train_file training_file",
    "dataset.config": "dataset_config dataset_config_name subset",
    "dataset.split": "dataset_split dataset_train_split train_on_split",
    "dataset.limit": "max_samples max_train_samples num_samples",
    "dataset.columns": "dataset_text_field formatting_func field_instruction field_output prompt_column",
    "training.method": "stage finetuning_stage trainer_type",
    "training.adapter": "finetuning_type peft_config peft_type use_peft lora",
    "training.adapter.type": "load_in_4bit quantization_bit quantization_config",
    "training.adapter.r": "lora_r lora_rank rank",
    "training.adapter.alpha": "lora_alpha",
    "training.adapter.dropout": "lora_dropout",
    "training.adapter.target_modules": "lora_target_modules lora_target lora_target_linear",
    "training.adapter.use_rslora": "peft_use_rslora rslora",
    "training.epochs": "num_train_epochs num_epochs n_epochs",
    "training.max_steps": "num_steps total_steps train_steps",
    "training.learning_rate": "lr base_learning_rate",
    "training.lr_scheduler_type": "lr_scheduler scheduler learning_rate_schedule",
    "training.lr_scheduler_kwargs": "scheduler_kwargs cosine_restarts",
    "training.warmup_steps": "num_warmup_steps lr_warmup_steps",
    "training.optim": "optimizer optimiser optimizer_type",
    "training.adam_beta1": "adam_b1 beta1",
    "training.adam_beta2": "adam_b2 beta2",
    "training.adam_epsilon": "adam_eps",
    "training.max_grad_norm": "gradient_clipping grad_clip clip_grad_norm",
    "training.per_device_train_batch_size": "batch_size micro_batch_size train_batch_size per_device_batch_size",
    "training.gradient_accumulation_steps": "grad_accum accumulation_steps gradient_accumulation",
    "training.gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing",
    "training.max_length": "max_seq_length max_seq_len sequence_len seq_length cutoff_len model_max_length block_size",
    "training.packing": "sample_packing packing_strategy neat_packing",
    "training.neftune_noise_alpha": "noisy_embedding_alpha",
    "training.learn": "train_on_inputs train_on_prompt train_on_prompts train_on_responses_only completion_only_loss "
    "assistant_only_loss mask_history roles_to_train",
    "training.checkpoint_steps": "save_steps saves_per_epoch",
    "training.seed": "random_state data_seed",
    "evaluation.source": "eval_dataset validation_file test_datasets",
    "evaluation.split": "dataset_test_split eval_split",
    "evaluation.holdout_fraction": "val_size val_set_size test_size validation_split",
    "evaluation.max_rows": "max_eval_samples",
    "target.accelerator_count": "num_gpus gpus nproc_per_node",
}
# Reason, advice, and the names.
_REFUSALS = (
    ("the device decides the precision", "no such field", "bf16 fp16 tf32 pure_bf16 torch_dtype dtype"),
    (
        "8-bit weights have no place in the plan of the memory",
        "training.adapter.type 'qlora', for weights of 4 bits",
        "load_in_8bit",
    ),
    (
        "several GPUs train with FSDP2, and dropforge writes its settings",
        "target.accelerator_count of a target that has it",
        "deepspeed fsdp fsdp_config fsdp_version ddp_find_unused_parameters zero_stage",
    ),
    (
        "TRL computes it with a second forward pass and the logits of all tokens, and removes it in version 2",
        "no such field",
        "label_smoothing_factor label_smoothing",
    ),
    (
        "its memory is not in the plan, its merge is not compared with PEFT's, and vLLM serves no such adapter",
        "training.adapter.use_rslora, or a higher training.adapter.r",
        "use_dora peft_use_dora dora",
    ),
    ("a trained bias is lost in the merge", "no such field", "bias lora_bias"),
    (
        "new tokens and whole modules beside an adapter are lost in the merge, and a tied output would change, too",
        "training.adapter.type 'none' to train every weight; special tokens that the tokenizer already has",
        "modules_to_save lora_modules_to_save additional_target additional_tokens new_special_tokens tokens "
        "special_tokens add_tokens resize_vocab trainable_token_indices",
    ),
    (
        "an adapter starts from zero, so that base and adapter alone are the model",
        "the merged model of the earlier run, or of your own adapter (PEFT's merge_and_unload), in model.source",
        "adapter_name_or_path lora_model_dir adapter_path lora_path pretrained_adapter",
    ),
    (
        "a run resumes its own checkpoints by itself",
        "no such field; the model of an earlier run in model.source starts another run with it",
        "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir",
    ),
    (
        "adapters start as PEFT's default does, so that the first step is the base model's",
        "no such field",
        "init_lora_weights loftq_config pissa_init peft_init_lora_weights use_pissa",
    ),
    (
        "one learning rate trains all parameters",
        "training.learning_rate",
        "loraplus_lr_ratio loraplus_lr_embedding embedding_learning_rate learning_rate_multiplier",
    ),
    (
        "an optimiser with a projection has no checkpoint that resumes in other processes",
        "training.optim",
        "use_galore optim_target_modules optim_args use_badam use_apollo",
    ),
    (
        "the model is evaluated before and after the training, and its held-out loss is measured in between",
        "`evaluation`",
        "eval_steps eval_strategy evaluation_strategy evals_per_epoch per_device_eval_batch_size do_eval "
        "load_best_model_at_end metric_for_best_model early_stopping_patience",
    ),
    (
        "dropforge keeps the curves of a run itself",
        "no such field; `dropforge open` shows them",
        "report_to wandb_project wandb_entity logging_steps logging_dir log_level use_wandb tensorboard",
    ),
    (
        "the runs bucket keeps the model and the last two checkpoints",
        "no such field",
        "output_dir save_total_limit save_strategy save_only_model save_safetensors do_train",
    ),
    (
        "dropforge does not upload models to the Hub",
        "no such field; copy the model from the runs bucket",
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo",
    ),
    (
        "dropforge orders and loads the rows itself, so that a resumed run trains the same steps",
        "no such field",
        "group_by_length dataloader_num_workers dataset_num_proc preprocessing_num_workers shuffle "
        "shuffle_merged_datasets overwrite_cache remove_unused_columns",
    ),
)
TAKEN = {name: field for field, names in _NAMES.items() for name in names.split()}
REFUSED = {name: (reason, advice) for reason, advice, names in _REFUSALS for name in names.split()}
