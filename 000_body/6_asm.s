
/tmp/tmprxox97be.o:     file format elf64-x86-64


Disassembly of section .ltext:

0000000000000000 <k0_body>:
   0:	push   %rbp
   1:	push   %r15
   3:	push   %r14
   5:	push   %r13
   7:	push   %r12
   9:	push   %rbx
   a:	sub    $0x78,%rsp
   e:	movabs $0x0,%rax
  18:	mov    %rcx,%r14
  1b:	shl    $0x5,%r14
  1f:	movabs $0x0,%r12
  29:	mov    %r8,%rbx
  2c:	mov    %rcx,%rbp
  2f:	mov    %rdx,%r15
  32:	mov    %rdi,%r13
  35:	mov    %rsi,0x8(%rsp)
  3a:	vbroadcastss (%rax),%ymm0
  3f:	movabs $0x0,%rax
  49:	vbroadcastss (%rax),%ymm2
  4e:	movabs $0x0,%rax
  58:	vbroadcastss (%rax),%ymm1
  5d:	vmovups %ymm0,0x50(%rsp)
  63:	vmovups %ymm2,0x30(%rsp)
  69:	vmovups %ymm1,0x10(%rsp)
  6f:	jmp    9d <k0_body+0x9d>
  71:	data16 data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)
  80:	vmovups 0x0(%r13,%r14,1),%ymm0
  87:	mov    0x8(%rsp),%rax
  8c:	inc    %rbp
  8f:	vaddps %ymm0,%ymm0,%ymm0
  93:	vmovups %ymm0,(%rax,%r14,1)
  99:	add    $0x20,%r14
  9d:	cmp    %rbx,%rbp
  a0:	jge    189 <k0_body+0x189>
  a6:	vmovups 0x0(%r13,%r14,1),%ymm0
  ad:	vmovups 0x50(%rsp),%ymm1
  b3:	vmovdqu 0x10(%rsp),%ymm2
  b9:	xor    %eax,%eax
  bb:	vcmpltps 0x30(%rsp),%ymm0,%k0
  c7:	vmaxps %ymm0,%ymm1,%ymm1
  cb:	vextractf128 $0x1,%ymm1,%xmm0
  d1:	vcmpunordps %ymm1,%ymm1,%k1
  d8:	kortestb %k0,%k0
  dc:	setae  %al
  df:	vmaxps %ymm0,%ymm1,%ymm0
  e3:	vpternlogd $0xe0,%ymm2,%ymm1,%ymm0
  ea:	vmovaps %ymm1,%ymm0{%k1}
  f0:	vshufpd $0x1,%xmm0,%xmm0,%xmm1
  f5:	vcmpunordps %ymm0,%ymm0,%k1
  fc:	vmaxps %xmm1,%xmm0,%xmm1
 100:	vpternlogd $0xe0,%ymm2,%ymm0,%ymm1
 107:	vmovaps %ymm0,%ymm1{%k1}
 10d:	vmovshdup %xmm1,%xmm0
 111:	vcmpunordss %xmm1,%xmm1,%k1
 118:	vmaxss %xmm0,%xmm1,%xmm0
 11c:	vpternlogd $0xa8,%xmm0,%xmm1,%xmm2
 123:	vmovss %xmm1,%xmm2,%xmm2{%k1}
 129:	vmovss %xmm2,0x40(%r15)
 12f:	mov    %eax,(%r15)
 132:	jb     80 <k0_body+0x80>
 138:	vmovss 0x40(%r15),%xmm0
 13e:	xor    %edi,%edi
 140:	xor    %esi,%esi
 142:	mov    %r15,%rdx
 145:	vmovss %xmm0,(%r15)
 14a:	movl   $0x41a00000,0x80(%r15)
 155:	mov    %ebp,0xc0(%r15)
 15c:	vzeroupper
 15f:	call   *%r12
 162:	mov    $0x1,%esi
 167:	lea    0x80(%r15),%rdx
 16e:	xor    %edi,%edi
 170:	call   *%r12
 173:	mov    $0x2,%esi
 178:	lea    0xc0(%r15),%rdx
 17f:	xor    %edi,%edi
 181:	call   *%r12
 184:	jmp    80 <k0_body+0x80>
 189:	add    $0x78,%rsp
 18d:	pop    %rbx
 18e:	pop    %r12
 190:	pop    %r13
 192:	pop    %r14
 194:	pop    %r15
 196:	pop    %rbp
 197:	vzeroupper
 19a:	ret
 19b:	nopl   0x0(%rax,%rax,1)

00000000000001a0 <pbk_task0>:
 1a0:	push   %rax
 1a1:	shl    $0x8,%rcx
 1a5:	mov    %rsi,%rax
 1a8:	mov    (%rdi),%r10
 1ab:	mov    0x8(%rdi),%rsi
 1af:	add    0x10(%rdi),%rcx
 1b3:	movabs $0x0,%r9
 1bd:	mov    %rdx,%r8
 1c0:	mov    %rcx,%rdx
 1c3:	mov    %r10,%rdi
 1c6:	mov    %rax,%rcx
 1c9:	call   *%r9
 1cc:	pop    %rax
 1cd:	ret
 1ce:	xchg   %ax,%ax

00000000000001d0 <pbk_main>:
 1d0:	sub    $0x18,%rsp
 1d4:	vmovups (%rsi),%xmm0
 1d8:	movabs $0x0,%rax
 1e2:	mov    %rsp,%rdi
 1e5:	xor    %esi,%esi
 1e7:	xor    %ecx,%ecx
 1e9:	vmovups %xmm0,(%rsp)
 1ee:	mov    %rdx,0x10(%rsp)
 1f3:	mov    $0x4,%edx
 1f8:	call   *%rax
 1fa:	add    $0x18,%rsp
 1fe:	ret
 1ff:	nop

0000000000000200 <pbk_run>:
 200:	push   %r15
 202:	push   %r14
 204:	push   %r13
 206:	push   %r12
 208:	push   %rbx
 209:	sub    $0x10,%rsp
 20d:	mov    %rsi,%rbx
 210:	movabs $0x0,%r15
 21a:	movabs $0x0,%rax
 224:	lea    0x8(%rsp),%rcx
 229:	mov    $0x1000,%esi
 22e:	mov    $0x1000,%edx
 233:	mov    %rdi,%r14
 236:	mov    %r15,%rdi
 239:	call   *%rax
 23b:	mov    0x8(%rsp),%r13
 240:	mov    %rax,%r12
 243:	movabs $0x0,%rax
 24d:	mov    %r14,%rdi
 250:	mov    %rbx,%rsi
 253:	mov    %r13,%rdx
 256:	call   *%rax
 258:	movabs $0x0,%rax
 262:	mov    %r15,%rdi
 265:	mov    %r13,%rsi
 268:	mov    %r12,%rdx
 26b:	call   *%rax
 26d:	add    $0x10,%rsp
 271:	pop    %rbx
 272:	pop    %r12
 274:	pop    %r13
 276:	pop    %r14
 278:	pop    %r15
 27a:	ret
 27b:	nopl   0x0(%rax,%rax,1)

0000000000000280 <pbk_call>:
 280:	push   %rax
 281:	movabs $0x0,%rax
 28b:	mov    %rdi,%rsi
 28e:	xor    %edi,%edi
 290:	call   *%rax
 292:	pop    %rax
 293:	ret
 294:	data16 data16 cs nopw 0x0(%rax,%rax,1)

00000000000002a0 <pbk_handler>:
 2a0:	mov    0x8(%rdi),%rax
 2a4:	test   %rax,%rax
 2a7:	je     2d8 <pbk_handler+0x38>
 2a9:	cmpl   $0x1,0x8(%rax)
 2ad:	sete   %cl
 2b0:	test   %cl,%cl
 2b2:	je     2de <pbk_handler+0x3e>
 2b4:	mov    0x18(%rax),%rax
 2b8:	movabs $0x300000000,%rcx
 2c2:	mov    %rcx,0x18(%rax)
 2c6:	movl   $0x0,0x20(%rax)
 2cd:	movq   $0x0,0x28(%rax)
 2d5:	xor    %eax,%eax
 2d7:	ret
 2d8:	xor    %ecx,%ecx
 2da:	test   %cl,%cl
 2dc:	jne    2b4 <pbk_handler+0x14>
 2de:	sub    $0x18,%rsp
 2e2:	mov    0x48(%rdi),%rax
 2e6:	mov    0x70(%rdi),%rcx
 2ea:	lea    0x8(%rsp),%rsi
 2ef:	mov    (%rax),%rax
 2f2:	mov    0x18(%rax),%rax
 2f6:	mov    %rax,0x8(%rsp)
 2fb:	mov    (%rcx),%rax
 2fe:	mov    0x18(%rax),%rax
 302:	mov    %rax,0x10(%rsp)
 307:	movabs $0x0,%rax
 311:	call   *%rax
 313:	add    $0x18,%rsp
 317:	xor    %eax,%eax
 319:	ret
 31a:	nopw   0x0(%rax,%rax,1)

0000000000000320 <_mlir_k0_body>:
 320:	push   %rax
 321:	mov    (%rdi),%rax
 324:	mov    0x10(%rdi),%rdx
 328:	mov    0x8(%rdi),%rcx
 32c:	mov    0x18(%rdi),%r8
 330:	mov    0x20(%rdi),%rdi
 334:	movabs $0x0,%r9
 33e:	mov    (%rcx),%rsi
 341:	mov    (%r8),%rcx
 344:	mov    (%rax),%rax
 347:	mov    (%rdi),%r8
 34a:	mov    (%rdx),%rdx
 34d:	mov    %rax,%rdi
 350:	call   *%r9
 353:	pop    %rax
 354:	ret
 355:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000360 <_mlir_pbk_task0>:
 360:	push   %rax
 361:	mov    (%rdi),%rax
 364:	mov    0x10(%rdi),%rdx
 368:	mov    0x8(%rdi),%rcx
 36c:	mov    0x18(%rdi),%rdi
 370:	movabs $0x0,%r8
 37a:	mov    (%rcx),%rsi
 37d:	mov    (%rax),%rax
 380:	mov    (%rdi),%rcx
 383:	mov    (%rdx),%rdx
 386:	mov    %rax,%rdi
 389:	call   *%r8
 38c:	pop    %rax
 38d:	ret
 38e:	xchg   %ax,%ax

0000000000000390 <_mlir_pbk_main>:
 390:	push   %rax
 391:	mov    (%rdi),%rax
 394:	mov    0x10(%rdi),%rdx
 398:	mov    0x8(%rdi),%rcx
 39c:	mov    (%rax),%rax
 39f:	mov    (%rcx),%rsi
 3a2:	mov    (%rdx),%rdx
 3a5:	movabs $0x0,%rcx
 3af:	mov    %rax,%rdi
 3b2:	call   *%rcx
 3b4:	pop    %rax
 3b5:	ret
 3b6:	cs nopw 0x0(%rax,%rax,1)

00000000000003c0 <_mlir_pbk_run>:
 3c0:	push   %rax
 3c1:	mov    0x8(%rdi),%rcx
 3c5:	mov    (%rdi),%rax
 3c8:	mov    (%rax),%rdi
 3cb:	mov    (%rcx),%rsi
 3ce:	movabs $0x0,%rax
 3d8:	call   *%rax
 3da:	pop    %rax
 3db:	ret
 3dc:	nopl   0x0(%rax)

00000000000003e0 <_mlir_pbk_call>:
 3e0:	push   %rax
 3e1:	mov    (%rdi),%rax
 3e4:	mov    (%rax),%rdi
 3e7:	movabs $0x0,%rax
 3f1:	call   *%rax
 3f3:	pop    %rax
 3f4:	ret
 3f5:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000400 <_mlir_pbk_handler>:
 400:	push   %rbx
 401:	mov    (%rdi),%rax
 404:	mov    %rdi,%rbx
 407:	mov    (%rax),%rdi
 40a:	movabs $0x0,%rax
 414:	call   *%rax
 416:	mov    0x8(%rbx),%rcx
 41a:	mov    %rax,(%rcx)
 41d:	pop    %rbx
 41e:	ret

