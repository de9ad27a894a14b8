# ruff: noqa: E501
"""Chat templates in the shapes that published ones have, written for tests: 60 of them, by name."""

H = "<|start_header_id|>"
E = "<|end_header_id|>\n\n"
ALTERNATE = "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"


def _llama2(*, strip: bool, sys: bool, eos: str) -> str:
    content = "content.strip()" if strip else "content | trim"
    system = "'<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content']" if sys else "message['content']"
    return (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
        "{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + ALTERNATE +
        "{% if loop.index0 == 0 and system_message != false %}{% set content = " + system + " %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + " + content + " + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + " + content + " + '" + eos + "' + eos_token }}"
        "{% endif %}{% endfor %}"
    )  # fmt: skip


def _chatml(*, item: bool, default: str, trim: bool, tag: bool) -> str:
    role, content = ("message['role']", "message['content']") if item else ("message.role", "message.content")
    content += " | trim" if trim else ""
    body = "{{ '<|im_start|>' + " + role + " + '\n' }}"
    said = "{{ (" + content + ") + '<|im_end|>' }}"
    said = "{% generation %}" + said + "{% endgeneration %}" if tag else said
    first = (
        "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n" + default + "<|im_end|>\n' }}"
        "{% endif %}"
    )
    return (
        "{% for message in messages %}" + (first if default else "") + body + said + "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def _header(*, open_: str, close: str, end: str, names: str = "{}", prompt: str = "assistant") -> str:
    """Role, text, end: Zephyr, TinyLlama, OpenChat, Granite and others."""
    return (
        "{%- set names = " + names + " -%}{{- bos_token -}}{% for m in messages %}"
        "{{- '" + open_ + "' + names.get(m.role, m.role) + '" + close + "' + m.content + " + end + " -}}{% endfor %}"
        "{%- if add_generation_prompt -%}{{- '" + open_ + prompt + close + "' -}}{%- endif -%}"
    )


LLAMA31 = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("no first user message") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=INDENT) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at once") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {%- if PYTHONIC %}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val ~ '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
VISION = """\
{{- bos_token }}{%- set found = namespace(image=false) %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] == 'image' %}
                {%- set found.image = true %}{{- '<|image|>' }}
            {%- elif content['type'] == 'text' %}
                {{- content['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
GUARD3 = """\
{%- if not categories is defined %}
    {%- set categories = {"S1": "Violence", "S2": "Fraud", "S3": "Hate"} %}
{%- endif %}
{{- bos_token + "<|start_header_id|>user<|end_header_id|>\\n\\nIs the last message safe?\\n<BEGIN CATEGORIES>" }}
{%- for key, value in categories.items() %}
    {{- "\\n" + key + ": " + value + "." }}
{%- endfor %}
{{- "\\n<END CATEGORIES>\\n\\n<BEGIN CONVERSATION>\\n" }}
{%- for message in messages %}
    {%- if message["role"] == "system" %}{%- continue %}{%- endif %}
    {%- for content in message["content"] | selectattr("type", "equalto", "text") %}
        {{- ("User" if message["role"] == "user" else "Agent") + ": " + content["text"] | trim + "\\n\\n" }}
    {%- endfor %}
{%- endfor %}
{{- "<END CONVERSATION><|eot_id|><|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
"""
MISTRAL3 = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("ids have nine letters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("unknown role") }}
    {%- endif %}
{%- endfor %}
"""
HERMES = """\
{%- macro kind(spec) %}
    {%- set kinds = {"string": "str", "integer": "int", "boolean": "bool"} %}
    {%- if spec.type is string and spec.type in kinds %}{{- kinds[spec.type] }}
    {%- elif spec.type == "array" %}{{- "list[" + kind(spec['items']) + "]" }}
    {%- elif spec.type is iterable and spec.type is not string %}{{- spec.type | join("|") }}
    {%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\nTools: <tools>\\n' }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '{"name": "' + tool.name + '", "signature": "' }}
        {%- for name, spec in tool.parameters.properties|items %}
            {{- name + ": " + kind(spec) }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {%- if tool.return is defined %}{{- " -> " + kind(tool.return) }}{%- endif %}
        {{- '", "parameters": ' + tool.parameters|tojson(ensure_ascii=False) + '}' }}
        {%- if not loop.last %}{{- "\\n" }}{%- endif %}
    {%- endfor %}
    {{- "</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' + tool_call.function.arguments|tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response>' if loop.last else '\\n</tool_response>\\n' }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}{%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    "{{'<User>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- for tool in message['tool_calls']%}"
    "{%- if not ns.is_first %}{{'<Assistant>'}}{%- set ns.is_first = true -%}{%- else %}{{'\\n'}}{%- endif %}"
    "{{tool['type'] + '<sep>' + tool['function']['name'] + '\\n```json\\n' + ARGUMENTS + '\\n```'}}"
    "{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{'<Assistant>' + content + eos_token}}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{'<out>' + message['content'] + '</out>'}}"
    "{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<Assistant><think>\\n'}}{% endif %}"
)
SMOLLM3 = """\
{%- set reasoning_mode = reasoning_effort | default("think") -%}
{%- if messages[0].role == "system" -%}
  {%- set instructions = messages[0].content | replace("/no_think", "") | trim -%}
  {%- if "/no_think" in messages[0].content %}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
{%- else -%}{%- set instructions = "" -%}{%- endif -%}
{{- "<|im_start|>system\n## Metadata\n\n" -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today Date: " ~ today ~ "\n" -}}
{{- "Reasoning Mode: " + reasoning_mode + "\n\n" -}}
{%- if instructions -%}{{- instructions + "\n\n" -}}{%- endif -%}
{%- if tools -%}
  {%- set ns = namespace(text="<tools>\n") -%}
  {%- for tool in tools -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\n" -%}{%- endfor -%}
  {{- ns.text + "</tools>\n" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for message in messages -%}
  {%- if message.role == "user" -%}
    {{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}
    {%- if message.content is string -%}{%- set content = message.content -%}{%- else -%}{%- set content = "" -%}{%- endif -%}
    {{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
    {% endgeneration %}
  {%- elif message.role == "tool" -%}
    {{ "<|im_start|>" + "user\n" + message.content + "<|im_end|>\n" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}
"""
COMMAND_R = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = 'You are helpful.' %}{% endif %}{{ '<|SYS|>' + system_message }}"
    "{%- for tool in tools or [] %}{{ '\\n\\n```python\\ndef ' + tool['function']['name'] + '(' }}"
    "{%- for name, fields in tool['function']['parameters']['properties'].items() %}{{ name + ': ' }}"
    "{{ 'List' if fields.type == 'array' else (fields.type | upper if fields.type is string else 'ANY') }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ ')' }}"
    "{% if tool['function']['return'] is defined %}{{ ' -> ' + tool['function']['return']['type'] }}{% endif %}"
    "{{ ':\\n\"\"\"' + tool['function']['description'] + '\"\"\"\\npass\\n```' }}{% endfor %}"
    "{% for message in loop_messages %}{% set content = message['content'] | default('') %}"
    "{% if message['role'] == 'user' %}{{ '<|USER|>' + content.strip() + '<|END|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|BOT|>' + content.strip() }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name ~ call.function.arguments | tojson(indent=2) }}"
    "{% endfor %}{{ '<|END|>' }}"
    "{% elif message['role'] == 'tool' %}{{ '<results>\\n' + content | indent(2) + '</results>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|BOT|>' }}{% endif %}"
)
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'].rstrip() ~ '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '### Instruction:\n' ~ message['content'] ~ '\n\n' }}"
    "{% else %}{{ '### Response:\n' ~ (message['content'] or '') ~ '\n<|EOT|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:' }}{% endif %}"
)
VICUNA = (
    "{%- set seps = [' ', eos_token] -%}{% if messages[0].role != 'system' %}{{ 'A chat.' + seps[0] }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + seps[0] }}{% else %}"
    "{{ m.role | upper | replace('TOOL', 'USER') + ': ' + (m.content | default('', true)) + seps[m.role == 'assistant'] }}"
    "{% endif %}{% endfor %}{{ 'ASSISTANT:' if add_generation_prompt }}"
)

SHAPES: dict[str, str] = {
    "llama2": _llama2(strip=True, sys=True, eos=" "),
    "llama2-trim": _llama2(strip=False, sys=True, eos=" "),
    "codellama": _llama2(strip=True, sys=True, eos="  "),
    "mistral1": _llama2(strip=False, sys=False, eos=""),
    "mistral3": MISTRAL3,
    "mistral-tekken": MISTRAL3.replace('"[INST] "', '"[INST]"').replace('" " + message', "message"),
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '" + H
    + "' + message['role'] + '" + E + "'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ '" + H + "assistant" + E + "' }}",
    "llama3.1": LLAMA31.replace("INDENT", "4").replace("PYTHONIC", "builtin_tools is defined"),
    "llama3.1-pythonic": LLAMA31.replace("INDENT", "none").replace("PYTHONIC", "true"),
    "llama3.2": LLAMA31.replace("INDENT", "2").replace("PYTHONIC", "false"),
    "llama3.2-system-tools": LLAMA31.replace("tools_in_user_message = true", "tools_in_user_message = false")
    .replace("INDENT", "4").replace("PYTHONIC", "false"),
    "llama3.3": LLAMA31.replace("INDENT", "4, ensure_ascii=true").replace("PYTHONIC", "false"),
    "llama3.2-vision": VISION,
    "llama-guard-3": GUARD3,
    "llama-guard-index": GUARD3.replace('for content in message["content"] | selectattr("type", "equalto", "text")',
                                        'for content in message["content"][:1]'),
    "parts-joined": "{% for m in messages %}{{ m.role }}: {{ m.content | map(attribute='text') | join('|') }}\n"
    "{% endfor %}",
    "parts-macro": "{% macro write(parts) %}{% for p in parts %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endmacro %}{% for m in messages %}<{{ m.role }}>{{ write(m.content) }}{% endfor %}",
    "parts-or-text": "{% for m in messages %}{% set c = m.content %}{% if c is not string %}"
    "{% set c = c[0]['text'] if c else '' %}{% endif %}{{ m.role ~ '> ' ~ c ~ '\n' }}{% endfor %}",
    "hermes": HERMES,
    "hermes-no-bos": HERMES.replace("{{- bos_token }}\n", ""),
    "deepseek-r1-text": R1.replace("ARGUMENTS", "tool['function']['arguments']"),
    "deepseek-r1-object": R1.replace("ARGUMENTS", "tool['function']['arguments'] | tojson"),
    "deepseek-llm": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}"
    "{% endif %}",
    "deepseek-coder": "{% set found = namespace(system=false) %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set found.system = true %}{%- endif %}{%- endfor %}{{bos_token}}"
    "{%- if not found.system %}{{'You write code.\n'}}{% endif %}" + ALPACA,
    "smollm3": SMOLLM3,
    "command-r": COMMAND_R,
    "alpaca": ALPACA,
    "vicuna": VICUNA,
    "zephyr": "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content']"
    " + eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "tinyllama": _header(open_="<|", close="|>\n", end="eos_token + '\n'"),
    "openchat": _header(open_="GPT4 Correct ", close=": ", end="'<|end_of_turn|>'",
                        names="{'user': 'User', 'assistant': 'Assistant', 'system': 'System'}", prompt="Assistant"),
    "granite": _header(open_="<|start_of_role|>", close="<|end_of_role|>", end="'<|end_of_text|>\n'"),
    "phi-like": _header(open_="<|", close="|>", end="'<|end|>'"),
    "solar": _header(open_="### ", close=":\n", end="'\n\n'", names="dict(user='User', assistant='Assistant')",
                     prompt="Assistant"),
    "falcon3": _header(open_="\\n<|", close="|>\\n", end="''"),
    "amberchat": _header(open_="", close=": ", end="('</s>' if m.role == 'assistant' else '\n')"),
    "previous-and-next": "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}+"
    "{% endif %}{{ m.role[0] | upper }}{{ loop.index }}/{{ loop.length }}{{ loop.revindex0 }}"
    "{% if loop.nextitem is not defined %}!{% endif %}{{ m.content | default('-') }}{% endfor %}",
    "filters": "{% for m in messages %}{% set c = m.content | default('', true) | string %}"
    "{{ c | upper }}{{ c | lower | title }}{{ c | length }}{{ c.split() | first | default('') }}{{ c[::-1] }}{{ c[:3] }}"
    "{{ c | replace('a', 'b') | capitalize }}{{ c.startswith('H') }}{{ c.count('i') }}{{ c | wordcount }}{{ c | e }}"
    "{{ c.splitlines() | join('/') }}{{ c | truncate(9) }}{{ '%s:%d' | format(c, loop.index) }}{% endfor %}",
    "lists": "{% set roles = messages | map(attribute='role') | list %}{{ roles | unique | sort | join(',') }}"
    "{{ messages | rejectattr('role', 'equalto', 'system') | list | length }}{{ roles | last }}{{ roles[-2:] }}"
    "{{ messages | groupby('role') | map('first') | join('-') }}{{ roles.index('user') }}{{ range(3) | sum }}"
    "{{ roles | select('equalto', 'user') | list | tojson }}{{ [1, [2]] | tojson(indent=2) }}"
    "{% set keys = namespace(x=[]) %}{% for k, v in {'b': 1, 'a': none}.items() %}{% set keys.x = keys.x + [k] %}"
    "{% endfor %}{{ keys.x }}{{ {'b': 1, 'a': [true, none]} | tojson(sort_keys=true, separators=(',', ':')) }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1}.get('c', 'd') }}",
    "undefined": "{{ nothing }}{{ nothing is defined }}{{ messages[0].nothing | default('d') }}"
    "{% if messages[0].nothing %}x{% endif %}{{ 'tools' in messages[0] }}{{ tools is none }}{{ documents is none }}"
    "{{ unk is defined and unk }}{{ bos_token ~ eos_token }}{{ messages[0].get('nope') is none }}",
    "whitespace": "\n\n  {% for m in messages %}  \n    {#- note -#}\n {{ m.role }}  \n   {%- if true %} a {% endif +%} \n"
    "  {%+ if true %} b {%- endif %}\n{{- m.content | default('') -}}\n  {% endfor %}\n\n",
    "control": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ loop.cycle('a', 'b') }}{{ m.role }}{% else %}none{% endfor %}",
    "scope": "{% set x = 1 %}{% for m in messages %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}"
    "{% generation %}{% set x = 9 %}{{ x }}{% endgeneration %}{{ x }}{% with y = 2 %}{{ y }}{% endwith %}{{ y }}"
    "{% set block %}b{{ x }}{% endset %}{{ block }}{% filter upper %}abc{% endfilter %}"
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}"
    "{% call f(0) %}in{% endcall %}",
    "reasoning": "{% for m in messages %}{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>"
    "{% elif m.thinking %}{{ m.thinking }}{% endif %}{{ m.content | default('') }}{% if m.name %}({{ m.name }})"
    "{% endif %}{% endfor %}",
}  # fmt: skip
SHAPES |= {
    f"chatml{i}": _chatml(item=bool(i & 1), default="Be helpful." if i & 2 else "", trim=bool(i & 4), tag=bool(i & 8))
    for i in range(16)
}
