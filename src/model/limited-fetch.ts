import { LonghaulError } from '../core/index.ts';

/** Far above what an answer needs, framing included, and far below what fills memory. */
const MAX_BODY_BYTES = 64 * 1024 * 1024;

/** `fetch` whose body ends with `ModelMalformed` past a size: a line without end would fill memory. */
export async function limitedFetch(
  input: string | URL | Request,
  init?: RequestInit,
): Promise<Response> {
  const response = await fetch(input, init);
  if (response.body === null) return response;
  let bytes = 0;
  const counted = response.body.pipeThrough(
    new TransformStream<Uint8Array<ArrayBuffer>, Uint8Array<ArrayBuffer>>({
      transform(chunk, controller) {
        bytes += chunk.byteLength;
        if (bytes > MAX_BODY_BYTES) {
          controller.error(
            new LonghaulError(
              'ModelMalformed',
              `The response passed ${MAX_BODY_BYTES} bytes and was cut off`,
            ),
          );
        } else controller.enqueue(chunk);
      },
    }),
  );
  return new Response(counted, response);
}
