"""What shows each check, as a short script; `reproducer.py` puts the definitions before it."""

SCRIPTS = {
    # core
    "capabilities": "print(MODEL, client.get_server_capabilities().supported_models)",
    "info": "print(model.get_info())  # lora_rank 8",
    "forward_shapes": """\
found = model.forward([datum(), datum()], "cross_entropy").result().loss_fn_outputs
print(len(found), "equals", 2)
for one in found:
    print(len(one["logprobs"].data), "equals", 12)
    print("highest logprob", max(one["logprobs"].data))  # below 0""",
    "training_call": """\
print(train(model, datum()).metrics)  # has loss:sum
print(model.optim_step(types.AdamParams(learning_rate=1e-5)).result())""",
    "order_of_rows": """\
data = [datum(row), datum(row[:4]), datum(row[::-1])]
found = model.forward(data, "cross_entropy").result().loss_fn_outputs
for one, given in zip(found, (row, row[:4], row[::-1])):
    print(len(one["logprobs"].data), "equals", len(given) - 1)
    print(sum(one["logprobs"].data), "equals", score(model, given))""",
    "rows_are_apart": """\
beside = model.forward([datum(row[::-1]), datum(row)], "cross_entropy").result()
print(sum(beside.loss_fn_outputs[1]["logprobs"].data), "equals", score(model))""",
    "checkpoint_is_listed": """\
path = model.save_state("one").result().path
rest = client.create_rest_client()
print(path, rest.list_checkpoints(path.split("/")[2]).result())
rest.delete_checkpoint_from_tinker_path(path).result()""",
    "training_run": """\
name = model.get_info().model_id
print(client.create_rest_client().get_training_run(name).result())  # lora_rank 8""",
    "sampler_draws": """\
(one,) = draw(sampler, max_tokens=4)
print(one.tokens, one.logprobs)  # 1 to 4 tokens, each with a logprob of at most 0
print(max(len(one.tokens), 4), "equals", 4)""",
    # numbers
    "cross_entropy_is_a_sum": """\
out = train(model, datum(weights=[0.0, 2.0] * 6), datum())
first, second = (one["logprobs"].data for one in out.loss_fn_outputs)
print(out.metrics["loss:sum"], "equals", -2 * sum(first[1::2]) - sum(second))""",
    "importance_sampling": """\
import math
p = model.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
data = [datum(logprobs=[x - 0.3 for x in p], advantages=[1.5] * 12)]
out = model.forward_backward(data, "importance_sampling").result()
print(out.metrics["loss:sum"], "equals", -12 * math.exp(0.3) * 1.5)""",
    "ppo": """\
p = model.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
data = [datum(logprobs=[x - 0.3 for x in p], advantages=[1.5] * 12)]
config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
out = model.forward_backward(data, "ppo", config).result()
print(out.metrics["loss:sum"], "equals", -12 * 1.1 * 1.5)""",
    "cispo": """\
p = model.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
data = [datum(logprobs=[x - 0.3 for x in p], advantages=[1.5] * 12)]
config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
out = model.forward_backward(data, "cispo", config).result()
print(out.metrics["loss:sum"], "equals", -sum(1.2 * 1.5 * x for x in p))""",
    "dro": """\
p = model.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
data = [datum(logprobs=[x - 0.3 for x in p], advantages=[1.5] * 12)]
out = model.forward_backward(data, "dro", {"beta": 0.1}).result()
print(out.metrics["loss:sum"], "equals", -sum(1.5 * x - 0.05 * 0.3**2 for x in p))""",
    "gradient_is_a_sum": """\
one, two = new(), new()
train(one, datum(), datum()), step(one)
train(two, datum()), step(two, learning_rate=2 * RATE)
print(score(one), "equals", score(two))""",
    "calls_add_up": """\
one, two = new(), new()
train(one, datum()), train(one, datum(row[::-1])), step(one)
train(two, datum(), datum(row[::-1])), step(two)
print(score(one), "equals", score(two))""",
    "forward_keeps_gradients": """\
one, two = new(), new()
train(one, datum()), score(one, row[::-1]), step(one)
train(two, datum()), step(two)
print(score(one), "equals", score(two))""",
    "step_clears_gradients": """\
train(model, datum()), step(model)
before = score(model)
train(model, datum(weights=[0.0] * 12)), step(model)
print(score(model), "equals", before)""",
    "weights_scale": """\
one, two = new(), new()
train(one, datum(weights=[0.5] * 12)), step(one, learning_rate=2 * RATE)
train(two, datum()), step(two)
print(score(one), "equals", score(two))""",
    "gradients_are_symmetric": """\
p = model.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
advantages = [1.5, 1.0, 0.5, 2.0] * 3
def changed(one):  # the logprobs, by a step
    step(one)
    after = one.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    return [y - x for x, y in zip(p, after)]
one, two = new(), new()
train(one, datum())
data = [datum(logprobs=list(p), advantages=advantages)]
two.forward_backward(data, "importance_sampling").result()
print(sum(a * x for a, x in zip(advantages, changed(one))), "equals", sum(changed(two)))""",
    "learning_rate_and_eps": """\
one, two, before = new(), new(), score(new())
train(one, datum()), step(one)
train(two, datum()), step(two, learning_rate=2 * RATE, eps=4e6)
print(score(one) - before, "equals", 2 * (score(two) - before))
print("a step moves by", score(one) - before)  # not 0""",
    "beta1": """\
found = [score(model)]
for weight in (1.0, 0.0):
    train(model, datum(weights=[weight] * 12)), step(model, beta1=0.8)
    found.append(score(model))
print(found[2] - found[1], "equals", (found[1] - found[0]) * 0.8 / 1.8)""",
    "beta2": """\
found = [score(model)]
for weight in (1.0, 0.0):
    train(model, datum(weights=[weight] * 12))
    step(model, learning_rate=2e-5, beta1=0.8, beta2=0.2, eps=1e-30)
    found.append(score(model))
print(found[2] - found[1], "equals", (found[1] - found[0]) * 0.8 / 1.8 * (1.2 / 0.2) ** 0.5)""",
    "weight_decay": """\
start = score(model)
train(model, datum()), step(model)
train(model, datum(weights=[0.0] * 12))
step(model, learning_rate=0.1, beta2=0.0, eps=1.0, weight_decay=10.0)
print(score(model), "equals", start)""",
    "clipping": """\
one, two, before = new(), new(), score(new())
train(one, datum()), step(one, learning_rate=1e4 * RATE, grad_clip_norm=1e-4)
train(two, datum(), datum()), step(two, learning_rate=1e4 * RATE, grad_clip_norm=1e-4)
print(score(one) - before, "equals", score(two) - before)""",
    "seed_decides": """\
for one in (new(1), new(1), new(2)):
    train(one, datum()), step(one)
    print(score(one))  # the first two are equal, the third is not""",
    "models_are_apart": """\
one, other, alone = new(), new(2), new()
first = one.forward_backward([datum()], "cross_entropy")
second = other.forward_backward([datum(row[::-1])], "cross_entropy")
first.result(), second.result(), step(other), step(one)
found = score(one)  # before the next model trains
train(alone, datum()), step(alone)
print(found, "equals", score(alone))""",
    "state_is_restored": """\
train(model, datum()), step(model)
saved, path = score(model), model.save_state("two").result().path
train(model, datum()), step(model)
model.load_state(path).result()
made = client.create_training_client_from_state(path)
print(score(model), "equals", saved)
print(score(made), "equals", saved)""",
    "optimizer_is_restored": """\
def next_step():
    before = score(model)
    train(model, datum(weights=[0.0] * 12)), step(model, beta1=0.8)
    return score(model) - before
train(model, datum()), step(model, beta1=0.8)
path = model.save_state("three").result().path
own = next_step()
model.load_state_with_optimizer(path).result()
print(next_step(), "equals", own)
model.load_state(path).result()
print(next_step(), "is zero")""",
    # sampling
    "samplers_are_pinned": """\
prompt = types.ModelInput.from_ints(row)
before = sampler.compute_logprobs(prompt).result()
train(model, datum()), step(model)
model.save_weights_and_get_sampling_client()
print(sampler.compute_logprobs(prompt).result(), "equals", before)""",
    "prompt_logprobs_agree": """\
train(model, datum()), step(model)
sampler = model.save_weights_and_get_sampling_client()
found = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
print(sum(found[1:]), "equals", score(model))""",
    "sample_logprobs_agree": """\
one = draw(sampler)[0]
print(sum(one.logprobs), "equals", score(model, row + list(one.tokens)) - score(model))""",
    "seeds": """\
for seed in (1, 1, 2):
    print([one.tokens for one in draw(sampler, 4, seed=seed)])  # two equal lines, and another""",
    "counts": """\
found = draw(sampler, 5, max_tokens=3)
print(len(found), "equals", 5)
print(max(3, *(len(one.tokens) for one in found)), "equals", 3)  # the longest""",
    "stops": """\
whole = draw(sampler)[0].tokens
cut = draw(sampler, stop=[whole[1]])[0]
print(whole, cut.tokens, cut.stop_reason)  # the second ends at whole[1]: stop""",
    "greedy_ways": """\
for way in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}):
    print(draw(sampler, **way)[0].tokens)  # three equal lines""",
    "frequencies": """\
for temperature in (0.1, 1.0, 2.0):
    drawn = draw(sampler, 256, max_tokens=1, temperature=temperature)
    print(temperature, len({one.tokens[0] for one in drawn}))  # more different tokens each time""",
    "samplers_of_paths": """\
train(model, datum()), step(model, learning_rate=50 * RATE)
path, wanted = model.save_weights_for_sampler("four").result().path, score(model)
train(model, datum()), step(model)
sampler = client.create_sampling_client(model_path=path)
found = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
print(sum(found[1:]), "equals", wanted)""",
    "base_is_untouched": """\
base, prompt = client.create_sampling_client(base_model=MODEL), types.ModelInput.from_ints(row)
before = base.compute_logprobs(prompt).result()
train(model, datum()), step(model)
print(base.compute_logprobs(prompt).result(), "equals", before)""",
    "on_policy_ratio": """\
q = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()[1:]
data = [datum(logprobs=q, advantages=[1.0] * 12)]
print(model.forward_backward(data, "importance_sampling").result().metrics)  # loss:sum -12""",
    # models
    "each_model_is_served": """\
for one in client.get_server_capabilities().supported_models:
    model = client.create_lora_training_client(one.model_name, rank=8)
    print(one.model_name, score(model), model.get_info().model_data)""",
    "models_differ": """\
for one in client.get_server_capabilities().supported_models:
    print(one.model_name, score(client.create_lora_training_client(one.model_name, rank=8)))""",
    "ranks": """\
for rank in (1, 32):
    one = new(rank=rank)
    before = score(one)
    train(one, datum()), step(one)
    print(one.get_info().lora_rank, "equals", rank)
    print("a step moves by", score(one) - before)  # not 0""",
    "context_length": """\
longest = client.get_server_capabilities().supported_models[0].max_context_length
print(score(model, [20] * (longest + 1)))  # as many input tokens as are allowed
print(score(model, [20] * (longest + 2)))  # is refused""",
    # images
    "images_are_seen": """\
for shade in (10, 240):
    image = types.ImageChunk(data=PNG(shade), format="png")
    chunks = [image, types.EncodedTextChunk(tokens=row)]
    print(sampler.compute_logprobs(types.ModelInput(chunks=chunks)).result()[-13:])  # differ""",
    "images_train": """\
image, text = types.ImageChunk(data=PNG(10), format="png"), types.EncodedTextChunk(tokens=row)
prompt = types.ModelInput(chunks=[image, text])
sampled = sampler.compute_logprobs(prompt).result()
count = len(sampled)
given = {"target_tokens": [0] * (count - 14) + row + [20]}
given["weights"] = [0.0] * (count - 14) + [1.0] * 13 + [0.0]
out = train(model, types.Datum(model_input=prompt, loss_fn_inputs=given))
print(out.metrics["loss:sum"], "equals", -sum(sampled[-13:]))""",
    "image_positions": """\
image, text = types.ImageChunk(data=PNG(10), format="png"), types.EncodedTextChunk(tokens=row)
with_image = types.ModelInput(chunks=[text, image])
print(sampler.compute_logprobs(with_image).result()[1:13])
print(sampler.compute_logprobs(types.ModelInput(chunks=[text])).result()[1:13])  # equal""",
    "broken_images": """\
image = types.ImageChunk(data=b"no image", format="png")
chunks = [image, types.EncodedTextChunk(tokens=row)]
print(sampler.compute_logprobs(types.ModelInput(chunks=chunks)).result())  # is refused""",
    # load
    "added_latency": """\
import time
for _ in range(5):
    began = time.perf_counter()
    score(model)
    print(time.perf_counter() - began)
began = time.perf_counter()
futures = [model.forward([datum()], "cross_entropy") for _ in range(16)]
print([future.result() for future in futures][0] and (time.perf_counter() - began) / 16)""",
    "small_calls_pass": """\
import time
name, rest = model.get_info().model_id, client.create_rest_client()
futures = [model.forward_backward([datum()] * 32, "cross_entropy") for _ in range(16)]
began = time.perf_counter()
print(rest.get_training_run(name).result(), time.perf_counter() - began)  # no wait
print(len([future.result() for future in futures]))""",
    "many_models": """\
models = [new() for _ in range(6)]
futures = [one.forward_backward([datum()], "cross_entropy") for one in models]
print([future.result().metrics for future in futures])
for one in models:
    step(one)
print([score(one) for one in models])  # equal""",
    "fair_between_keys": """\
import os, time
flood = [model.forward_backward([datum()] * 32, "cross_entropy") for _ in range(24)]
client = tinker.ServiceClient(base_url=URL, api_key=os.environ["SECOND_TINKER_API_KEY"])
began = time.perf_counter()
train(new(), datum()), print(time.perf_counter() - began)  # does not wait for the flood
print(len([one.result() for one in flood]), time.perf_counter() - began)""",
    # durability
    "repeated_requests": """\
name, adam = model.get_info().model_id, {"learning_rate": RATE, "beta1": 0.0, "eps": 1e6}
train(model, datum())
asked = {"model_id": name, "seq_id": 77, "adam_params": adam}
print(post("optim_step", **asked), post("optim_step", **asked))  # one request, one step""",
    "results_are_kept": """\
name = model.get_info().model_id
asked = post("optim_step", model_id=name, seq_id=77, adam_params={"learning_rate": 0.0})
for _ in range(2):
    print(post("retrieve_future", request_id=asked["request_id"]))  # two equal answers""",
    "killed_with_a_gradient": """\
one, two = new(), new()
train(one, datum()), step(one)
train(two, datum())
input("Kill the server, then press Enter: ")
step(two)
print(score(two), "equals", score(one))""",
    "killed_during_a_call": """\
one, two = new(), new()
train(one, *[datum()] * 32), step(one, learning_rate=RATE / 8)
future = two.forward_backward([datum()] * 32, "cross_entropy")
input("Kill the server, then press Enter: ")
future.result(), step(two, learning_rate=RATE / 8)
print(score(two), "equals", score(one))""",
    "killed_with_a_sampler": """\
train(model, datum()), step(model, learning_rate=50 * RATE)
sampler = model.save_weights_and_get_sampling_client()
input("Kill the server, then press Enter: ")
found = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
print(sum(found[1:]), "equals", score(model))""",
    # hostile
    "short_targets": """\
bad = datum()
bad.loss_fn_inputs["target_tokens"] = types.TensorData(data=[20, 21], dtype="int64", shape=[2])
print(train(model, bad))  # is refused: 2 targets for 12 tokens""",
    "weights_that_are_not_numbers": """\
print(train(model, datum(weights=[float("nan")] * 12)))  # is refused""",
    "infinite_losses": """\
data = [datum(logprobs=[-1e30] * 12, advantages=[1.0] * 12)]
print(model.forward_backward(data, "importance_sampling").result())  # is refused""",
    "unknown_tokens": """\
print(score(model, [*row[:-2], 10**9, 20]))  # is refused""",
    "unknown_losses": """\
data = [datum(logprobs=[-1.0] * 12, advantages=[1.0] * 12)]
print(model.forward_backward(data, "ppo", {"clip_low_treshold": 0.9}).result())  # is refused""",
    "bad_steps": """\
for wrong in ({"learning_rate": float("nan")}, {"learning_rate": float("inf")}, {"beta1": 1.5}):
    train(model, datum())
    try:
        model.optim_step(types.AdamParams(**wrong)).result()
        print(wrong, "was accepted")
    except Exception as error:
        print(wrong, type(error).__name__, str(error)[:100])  # each is refused by name""",
    "bad_samples": """\
for wrong in ({"temperature": -1.0}, {"top_p": 1.5}, {"max_tokens": 10**9}):
    try:
        draw(sampler, **wrong)
        print(wrong, "was accepted")
    except Exception as error:
        print(wrong, type(error).__name__, str(error)[:100])  # each is refused by name""",
    "names_that_are_paths": """\
print(model.save_state("../../outside").result())  # is refused""",
    "unknown_things": """\
made = lambda name: client.create_lora_training_client(name, rank=8).get_info()
opened = lambda path: client.create_training_client_from_state(path).get_info()
for call, wrong in ((made, "none/none"), (opened, "tinker://none/weights/none")):
    try:
        print(call(wrong), "was accepted")
    except Exception as error:
        print(wrong, type(error).__name__, str(error)[:100])  # each is refused by name""",
    "others_go_on": """\
good, bad = new(), new(2)
future = good.forward([datum()], "cross_entropy")
try:
    train(bad, datum(weights=[float("nan")] * 12))
except Exception as error:
    print(type(error))
print(future.result(), score(good))  # are as without the bad call""",
}
